"""Computes the expected dollars to finish on every offer, and why an offer was dropped.

`machine_cost` holds the costs of a kind of machine; this module adds prices, hazards and the limits of the spec.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from functools import cached_property
from heapq import nsmallest
from math import inf
from operator import attrgetter
from typing import cast, overload

from broker.domain.formatting import unsold_regions
from broker.domain.instance import Caps
from broker.domain.money import ZERO, format_usd
from broker.domain.offer import GB, DropReason, Offer, OfferSummary, OfferVerdict, Quote, QuoteLine, SpotOutlook
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.estimator.planning.fit import Fit, fit
from broker.estimator.preemption_rate import basis
from broker.quote.machine_cost import HostDemands, MachineCost, kind_of, line_key, scarcity_note
from broker.quote.offer_index import OfferGroup, OfferIndex, offer_index, rank
from broker.quote.offer_rules import GroupCase, apply_rules, dollars, drop_message, total_usd
from broker.quote.request import QuoteRequest, drop_reason
from broker.quote.spot.delay import sold_out_spot
from broker.quote.spot.market import AssessedMarket, spot_outlook
from broker.quote.spot.plan import PlanSource, plan_for
from broker.quote.token_cache import rows_bytes

FIRST_LINES = 128
"""Number of lines that a quote ranks at once."""
LIFETIME = timedelta(minutes=5)
CAP_MARGIN, CENT = Decimal("1.25"), Decimal("0.01")
UNKNOWN_CAPS = Caps(spot=True)
MEASURED_TOLERANCE = 0.05
"""Maximum relative difference of a measured and an estimated step that confirms the estimate."""
MEASURED_SPREAD = 1.02
"""P90 / P50 of the duration of work whose speed was measured [assumed]."""

_HARDWARE = attrgetter("accelerator", "gpus", "gpu_memory_bytes", "emulated_on", "emulated_vcpus")
"""Fields that `fit` reads, in addition to the link between the GPUs and the cores of a CPU."""


def _kind(ask: QuoteRequest, offer: Offer) -> MachineCost:
    caps, facts = ask.caps.get(offer.provider, UNKNOWN_CAPS), offer.facts
    hardware = (_HARDWARE(offer), _cores(offer), facts.interconnect if facts else None)
    fits = ask.fits.get(hardware)
    if fits is None:
        fits = fit(ask.workload, offer, nodes=ask.nodes, local=ask.local_files, learned=ask.learned)
        fits = _with_measured_speed(ask, fits)
        ask.fits[hardware] = fits
    verdict = drop_reason(ask, offer, caps) or (fits.drop, fits.reason)
    # Spot and on-demand machines differ in price and hazard only, so most of them share one object.
    key = (
        offer.provider, hardware, facts and line_key(facts), offer.billing_quantum_s, offer.billing_minimum_s,
        offer.reaches_local_files, verdict,
    )  # fmt: skip
    kind = ask.kinds.get(key)
    if kind is None:
        kind = ask.kinds[key] = kind_of(
            ask.workload, offer, fits, caps, verdict, nodes=ask.nodes, storage_usd_per_gib_month=ask.storage,
            demands=HostDemands.of(ask.spec.resources),
        )  # fmt: skip
    return kind


def _with_measured_speed(ask: QuoteRequest, fits: Fit) -> Fit:
    """Return the fit with a narrow spread of the speed if the job itself has measured the estimated speed."""
    pace, measured_s = fits.pace, ask.measured_step_s
    if pace is None or measured_s is None or abs(measured_s / pace.step_s - 1) > MEASURED_TOLERANCE:
        return fits
    return replace(fits, pace=replace(pace, spread=min(pace.spread, MEASURED_SPREAD)))


def _cores(offer: Offer) -> int:
    """Return the number of cores if a CPU computes, otherwise 0."""
    return offer.vcpus if offer.emulated_on or not offer.gpus else 0


def _assess(
    ask: QuoteRequest, offers: Sequence[Offer], group: OfferGroup, kind: MachineCost, evaluation: "_Evaluation"
) -> None:
    """Fill the columns for offers of one kind of machine: drop reason and cost to finish."""
    if kind.drop is None:
        drops, micros = evaluation.drops, evaluation.micros
        apply_rules(GroupCase(ask=ask, offers=offers, group=group, kind=kind, drops=drops, micros=micros))
        return
    for number in group.numbers:
        evaluation.drops[number] = kind.drop


def _notes(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> str:
    notes = scarcity_note(offer, kind.host)
    if offer.added_disk_usd_per_hour:
        notes += f"; a disk of {offer.disk_bytes / GB:.4g} GB, for {format_usd(offer.added_disk_usd_per_hour)}/h more"
    if hazard := basis(offer, ask.learned.spots):
        notes += f"; {hazard}"
    if offer.spot and ask.fallback_s < inf and ask.finish_s(offer, kind) + kind.drained_s > ask.deadline_s:
        latest_s = max(0.0, ask.deadline_s - ask.fallback_s - kind.drained_s)
        notes += f"; slower than the deadline allows: on demand from {latest_s / 3600:.1f} h on if preempted"
    if ask.accepts_risk:
        notes += "; may miss the deadline: P90 is later"
    if kind.caps.self_stop == "none" and kind.caps.trust != "own":
        notes += "; it cannot stop itself: only its cloud's API ends the billing"
    return notes


class _Evaluation:
    """Columns with an entry for each offer.

    They are flat lists, because 50,000 tuples would slow down the garbage collector.
    """

    def __init__(self, ask: QuoteRequest, index: OfferIndex) -> None:
        self.ask, self.sold = ask, index
        self.kinds = [_kind(ask, machines.like) for machines in index.machines]
        self.drops: list[DropReason | None] = [None] * len(index.offers)
        self.micros = [-1] * len(index.offers)
        """Micro-dollars to finish; -1: the job never finishes on this offer."""
        self._assess_market(is_spot=False)
        ask.fallback_s = self._fallback_s() if ask.deadline_s < inf and ask.workload.shape else inf
        self._assess_market(is_spot=True)

    def _assess_market(self, *, is_spot: bool) -> None:
        for kind, machines in zip(self.kinds, self.sold.machines, strict=True):
            if machines.like.spot is is_spot:
                _assess(self.ask, self.sold.offers, machines, kind, self)

    def _fallback_s(self) -> float:
        """Return the seconds in which the fastest kept on-demand offer finishes; infinity: no such offer is kept."""
        offers, fallback_s = self.sold.offers, inf
        for kind, machines in zip(self.kinds, self.sold.machines, strict=True):
            if machines.like.spot or kind.drop is not None:
                continue
            # Offers of one kind differ in price, place and host only, so on-demand offers take the same time.
            first = next((number for number in machines.numbers if self.drops[number] is None), None)
            if first is not None:
                fallback_s = min(fallback_s, self.ask.finish_s(offers[first], kind))
        return fallback_s

    def at(self, number: int) -> tuple[Offer, MachineCost, DropReason | None]:
        return self.sold.offers[number], self.kinds[self.sold.which[number]], self.drops[number]

    def keys(self) -> Sequence[float]:
        """Return the values that rank the offers, smaller first. For a script only prices are known."""
        objective = "fastest" if self.ask.accepts_risk else self.ask.spec.resources.objective
        if not self.ask.workload.shape or objective == "hourly":
            return self._column(lambda kind, price, rate: price)
        if objective == "cheapest":
            return self.micros
        seconds = self._column(lambda kind, price, rate: kind.p50(rate))
        if objective == "fastest":
            return seconds
        # One percent less money is worth one percent more time.
        return [cost * time for cost, time in zip(self.micros, seconds, strict=True)]

    def _column(self, key: Callable[[MachineCost, float, float], float]) -> list[float]:
        """Return a column with `key(kind, price, rate)` of each offer.

        `rate`: preemptions per second on all machines of the job together.
        """
        column, nodes = [inf] * len(self.micros), self.ask.nodes
        for kind, group in zip(self.kinds, self.sold.machines, strict=True):
            for number, price, rate in zip(group.numbers, group.prices, group.rates, strict=True):
                column[number] = key(kind, price, rate * nodes)
        return column


class _LazyLines(Sequence[QuoteLine]):
    """Lines of a quote, each built on access, kept offers first.

    Most callers read the first lines only, so the other offers are ranked when one of them is read.
    """

    def __init__(self, evaluation: _Evaluation, eligible: list[int]) -> None:
        self._ask, self._evaluation, self._eligible = evaluation.ask, evaluation, eligible
        self._keys = evaluation.keys()
        self._first = rank(_smallest(eligible, self._keys), self._keys, evaluation.sold.offers)
        """Numbers of the first offers."""
        self._built: dict[int, QuoteLine] = {}
        """Lines of the offers that were read first, by number."""

    @cached_property
    def _order(self) -> list[int]:
        """Numbers of all offers."""
        evaluation = self._evaluation
        dropped = [number for number, drop in enumerate(evaluation.drops) if drop is not None]
        return rank(self._eligible, self._keys, evaluation.sold.offers) + dropped

    def __len__(self) -> int:
        return len(self._evaluation.drops)

    @overload
    def __getitem__(self, index: int) -> QuoteLine: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[QuoteLine, ...]: ...
    def __getitem__(self, index: int | slice) -> QuoteLine | tuple[QuoteLine, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            is_near = step > 0 and stop <= len(self._first)
            numbers = self._first[start:stop:step] if is_near else self._order[index]
            return tuple(map(self._line, numbers))
        return self._line(self._first[index] if 0 <= index < len(self._first) else self._order[index])

    def considered(self) -> Iterator[OfferSummary]:
        """Yield a short record of each offer, with the same dollars and reason as in the offer's line."""
        for number in self._order:
            offer, kind, drop = self._evaluation.at(number)
            if drop is None:
                cost = dollars(self._evaluation.micros[number]) if kind.fit.pace else None
                reason = kind.reason + _notes(self._ask, offer, kind)
            else:
                cost, reason = None, drop_message(self._ask, offer, kind, drop)
            yield OfferSummary(offer.id, offer.usd_per_hour, drop, reason, cost)

    def best_on_demand(self) -> QuoteLine | None:
        """Return the first kept line of an on-demand offer."""
        offers, keys = self._evaluation.sold.offers, self._keys
        on_demand = (number for number in self._eligible if not offers[number].spot)
        number = min(on_demand, key=lambda number: (keys[number], offers[number].id), default=None)
        return None if number is None else self._line(number)

    def of_offer(self, number: int) -> QuoteLine:
        """Return the line of the offer with this number in the market."""
        return self._line(number)

    def _line(self, number: int) -> QuoteLine:
        line = self._built.get(number)
        if line is None:
            line = self._new_line(number)
            if len(self._built) < FIRST_LINES:
                self._built[number] = line
        return line

    def _new_line(self, number: int) -> QuoteLine:
        offer, kind, drop = self._evaluation.at(number)
        if drop is None:
            return _kept_line(self._ask, offer, kind)
        reason = drop_message(self._ask, offer, kind, drop)
        return QuoteLine(offer=offer, verdict=OfferVerdict.DROPPED, reason=reason, drop=drop, memory=kind.fit.memory)


def _smallest(numbers: list[int], keys: Sequence[float]) -> list[int]:
    """Return the numbers with the smallest keys: `FIRST_LINES` of them, and those with the same key as the last."""
    if len(numbers) <= FIRST_LINES:
        return numbers
    last = nsmallest(FIRST_LINES, map(keys.__getitem__, numbers))[-1]
    return [number for number in numbers if keys[number] <= last]


def _kept_line(ask: QuoteRequest, offer: Offer, kind: MachineCost) -> QuoteLine:
    reason, pace, nodes = kind.reason + _notes(ask, offer, kind), kind.fit.pace, ask.nodes
    if pace is None:
        return QuoteLine(offer=offer, verdict=OfferVerdict.KEPT, reason=reason, nodes=nodes)
    rate = ask.rate(offer)
    p50, p90 = kind.p50(rate), ask.p90(offer, kind)
    return QuoteLine(
        offer=offer,
        verdict=OfferVerdict.KEPT,
        reason=reason,
        memory=kind.fit.memory,
        hours_p50=p50 / 3600,
        hours_p90=p90 / 3600,
        usd_p50=total_usd(offer, kind, nodes, rate, p50),
        usd_p90=total_usd(offer, kind, nodes, rate, p90),
        step_s=pace.step_s,
        evidence=ask.learned.with_record(pace.evidence, pace.tier, simulated=offer.simulated),
        tier=pace.tier,
        runs=pace.runs,
        nodes=nodes,
        plan=kind.fit.plan,
        hours=kind.hours(rate),
        costs=kind.costs(rate, float(offer.usd_per_hour) * nodes),
        rows_bytes=rows_bytes(ask.workload, offer, nodes),
    )


def _proposed_cap(spent: Decimal, p90: Decimal) -> Decimal:
    """Return the proposed cap in whole cents; it is positive even if the machine is free."""
    return max(CENT, (spent + p90 * CAP_MARGIN).quantize(CENT, rounding=ROUND_CEILING))


def _evaluate(ask: QuoteRequest, index: OfferIndex) -> _Evaluation:
    """Evaluate all offers.

    If no offer's P90 meets the deadline, offers whose P50 meets the deadline are kept. A job must not wait only because
    its duration is uncertain.
    """
    evaluation = _Evaluation(ask, index)
    if None in evaluation.drops or DropReason.DEADLINE not in evaluation.drops or ask.deadline_s == inf:
        return evaluation
    risky = replace(ask, accepts_risk=True)
    risky.fits = ask.fits
    at_risk = _Evaluation(risky, index)
    return at_risk if None in at_risk.drops else evaluation


def _outlook(evaluation: _Evaluation, *, on_demand: bool) -> tuple[SpotOutlook, int] | None:
    """Return the outlook of the spot policy with the number of the offer that it prefers if something is bought."""
    assessed = AssessedMarket(
        ask=evaluation.ask,
        sold=evaluation.sold,
        kinds=evaluation.kinds,
        drops=evaluation.drops,
        micros=evaluation.micros,
    )
    chosen = spot_outlook(assessed, on_demand=on_demand)
    if chosen is None:
        return None
    outlook, spot, demand = chosen
    return outlook, spot if outlook.action == "spot" else demand


def _latest_on_demand_start(ask: QuoteRequest) -> datetime | None:
    """Return the latest time at which the rest can start on demand and end by the deadline, by its P90."""
    if ask.deadline_s == inf or ask.fallback_s == inf:
        return None
    return ask.now + timedelta(seconds=ask.deadline_s - ask.fallback_s)


def _quote(ask: QuoteRequest, offers: Sequence[Offer], spent: Decimal, *, on_demand: bool) -> Quote:
    evaluation = _evaluate(ask, offer_index(offers, ask.learned.spots))
    drops, micros = evaluation.drops, evaluation.micros
    eligible = [number for number, drop in enumerate(drops) if drop is None]
    lines, counts, planned = _LazyLines(evaluation, eligible), Counter(drops), _outlook(evaluation, on_demand=on_demand)
    del counts[None]
    p90 = lines[0].usd_p90 if eligible else None
    cheapest = min(filter((-1).__lt__, micros), default=None)
    return Quote(
        lines=lines,
        considered=lines.considered,
        made_at=ask.now,
        expires_at=ask.now + LIFETIME,
        proposed_cap_usd=None if p90 is None else _proposed_cap(spent, p90),
        kept_count=len(eligible),
        drops=cast("Counter[DropReason]", counts),
        cheapest_usd=None if cheapest is None else dollars(cheapest),
        deadline=None if ask.deadline_s == inf else ask.now + timedelta(seconds=ask.deadline_s),
        latest_on_demand_start=_latest_on_demand_start(evaluation.ask),
        best_on_demand=lines.best_on_demand,
        sold_out_spot=lambda: sold_out_spot(ask, evaluation.sold, drops, micros),
        spot_outlook=planned[0] if planned else None,
        preferred_line=lambda: lines.of_offer(planned[1]) if planned else None,
        deadline_at_risk=evaluation.ask.accepts_risk,
        unsold_regions=unsold_regions(ask.regions, {offer.region for offer in offers}) if ask.regions else (),
    )


def _with_disks(spec: JobSpec, offers: Sequence[Offer]) -> Sequence[Offer]:
    """Return the offers with disks as large as the spec demands, where their clouds sell them."""
    disk_gb = spec.resources.disk_gb
    return offers if disk_gb is None else [offer.with_disk(disk_gb * GB) for offer in offers]


def quote(
    spec: JobSpec,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    now: datetime,
    local_files: bool,
    scoped_store: bool,
    spent: Decimal,
    cap_left: Decimal,
    excluded: Mapping[str, str],
    caps: Mapping[str, Caps],
    machine_s: float = 0.0,
    lead_s: float = 0.0,
    storage_usd_per_gib_month: Decimal = ZERO,
    learned: Corrections = NO_CORRECTIONS,
    waited_s: float = 0.0,
    on_demand: bool = False,
    measured_step_s: float | None = None,
    plans: PlanSource = plan_for,
) -> Quote:
    """Return every offer once, kept offers first, ranked by the spec's objective (a script: by price), then by id.

    If no offer's P90 meets the deadline, offers whose P50 meets the deadline are kept, the fastest first.

    `workload`: the remaining work. `local_files`: the blob store or the model is a folder of this machine.
    `scoped_store`: True if the blob store issues credentials for one attempt's keys only. `spent`, `cap_left`: dollars
    of this job. `excluded`: reasons by offer id, host key or account, e.g. sold out a moment ago. `caps`: by provider.
    `machine_s`: seconds for which the job's machines have existed. `lead_s`: seconds before a time limit at which a
    drain begins; the cloud's teardown comes on top. `storage_usd_per_gib_month`: price of the blob store. `learned`:
    corrections of speed, memory and preemptions from own runs. `waited_s`: seconds for which the job had no machine.
    `on_demand`: the job runs on demand now. `measured_step_s`: seconds of a step that the job itself has measured.
    `plans`: source of spot plans; its errors are raised.
    """
    ask = QuoteRequest(
        spec=spec, workload=workload, now=now, local_files=local_files, scoped_store=scoped_store, cap_left=cap_left,
        excluded=excluded, caps=caps, machine_s=machine_s, lead_s=lead_s, storage=float(storage_usd_per_gib_month),
        learned=learned, waited_s=waited_s, measured_step_s=measured_step_s, plans=plans,
    )  # fmt: skip
    return _quote(ask, _with_disks(spec, offers), spent, on_demand=on_demand)
