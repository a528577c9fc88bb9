"""Expected dollars to finish on every offer, and why an offer was dropped.

What a kind of machine takes is worked out in `quote_kinds`; here prices, hazards and the spec's limits come to it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from math import ceil, inf
from operator import attrgetter
from typing import overload

from broker.decide.experience import NOTHING, Experience
from broker.decide.fit import fit
from broker.decide.hazard import basis
from broker.decide.quote_ask import Ask, policy
from broker.decide.quote_kinds import Kind, few, kind_of, line_key, short
from broker.decide.ranking import rank
from broker.domain.instance import Caps
from broker.domain.money import ZERO, show
from broker.domain.offer import Considered, Drop, Offer, Quote, QuoteLine, Verdict
from broker.domain.regions import unsold
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload

LIFETIME = timedelta(minutes=5)
CAP_MARGIN, CENT = Decimal("1.25"), Decimal("0.01")
UNKNOWN_CAPS = Caps(spot=True)

_HARDWARE = attrgetter("accelerator", "gpus", "gpu_memory_bytes", "emulated_on", "emulated_vcpus")
"""All that `fit` looks at, with the link between the GPUs and the cores of a CPU."""
_MACHINE = attrgetter(
    "provider", "accelerator", "gpus", "gpu_memory_bytes", "spot", "trust", "billing_quantum_s", "billing_minimum_s"
)
_HERE = attrgetter("emulated_on", "emulated_vcpus", "vcpus", "reaches_local_files")
"""With its lines, all that `_kind` looks at: two offers that agree in these are one kind of machine. Few have the
second part, and the time of a quote is that of making keys."""


def _kind(ask: Ask, offer: Offer) -> Kind:
    caps, facts = ask.caps.get(offer.provider, UNKNOWN_CAPS), offer.facts
    hardware = (_HARDWARE(offer), _cores(offer), facts.interconnect if facts else None)
    fits = ask.fits.get(hardware)
    if fits is None:
        fits = fit(ask.workload, offer, nodes=ask.nodes, local=ask.local_files, learned=ask.learned)
        ask.fits[hardware] = fits
    verdict = policy(ask, offer, caps) or (fits.drop, fits.reason)
    return kind_of(
        ask.workload, offer, fits, caps, verdict, nodes=ask.nodes, storage_usd_per_gib_month=ask.storage
    )  # fmt: skip


def _cores(offer: Offer) -> int:
    """Of what computes, where that is a CPU."""
    return offer.vcpus if offer.emulated_on or not offer.gpus else 0


def _dollars(micros: int) -> Decimal:
    return Decimal(micros).scaleb(-6)


def _up(usd: float) -> Decimal:
    """Rounded up to the micro-dollar, as `_assess` does."""
    return _dollars(ceil(usd * 1e6))


def _total(offer: Offer, kind: Kind, nodes: int, rate: float, seconds: float) -> Decimal:
    price = float(offer.usd_per_hour) * nodes
    return _up((price + kind.aside_usd) * kind.billed(seconds) + kind.traffic(rate))


def _assess(ask: Ask, offer: Offer, kind: Kind) -> tuple[Drop | None, int]:
    """An offer whose kind of machine would do: what speaks against it, and micro-dollars to finish; -1: never does."""
    if ask.regions and offer.region not in ask.regions:
        return Drop.REGION, -1
    if offer.vcpus < kind.cores or offer.ram_bytes < kind.ram or offer.disk_bytes < kind.disk:
        return Drop.HOST, -1
    asked = offer.usd_per_hour
    price = float(asked) * ask.nodes
    if price <= 0 and (price < 0 or kind.caps.trust != "own"):
        # Zero means unknown in several catalogues, but a machine of one's own may be free.
        return Drop.PRICE, -1
    if price > ask.limit:
        return Drop.HOURLY_LIMIT, -1
    if offer.spot:
        on_demand, rate = offer.on_demand_usd_per_hour, ask.rate(offer)
        if on_demand is not None and asked > on_demand:
            return Drop.PRICE, -1
        if rate * kind.lost >= 1:
            return Drop.PREEMPTED_TOO_OFTEN, -1
        hours, traffic = kind.bill(rate)
    else:
        hours, traffic = kind.undisturbed
    micros = ceil(((price + kind.aside_usd) * hours + traffic) * 1e6)
    if ask.timed and _late_s(ask, offer, kind) > 0:
        return Drop.DEADLINE, micros
    if micros > ask.cap_micros:
        return Drop.CAP, micros
    if offer.available is False:
        return Drop.UNAVAILABLE, micros
    if ask.excluded and (offer.id in ask.excluded or (ask.hosts and offer.host_key in ask.excluded)):
        return Drop.EXCLUDED, micros
    return None, micros


def _late_s(ask: Ask, offer: Offer, kind: Kind) -> float:
    """By how much it is too slow: its P90 for the deadline, its P50 for the machine time that is left."""
    rate, drained_s = ask.rate(offer), kind.teardown + 2 * kind.caps.list_lag_s + kind.quantum
    return max(ask.p90(offer, kind) - ask.deadline_s, kind.p50(rate) - ask.duration_s) + drained_s


def _reason(ask: Ask, offer: Offer, kind: Kind, drop: Drop | None) -> str:
    rate = ask.rate(offer)
    match drop:
        case Drop.REGION:
            return f"region {offer.region}; asked for {', '.join(sorted(ask.regions))}"
        case Drop.HOST:
            return short(offer, kind)
        case Drop.PRICE if offer.spot and offer.usd_per_hour > 0:
            return f"spot price {show(offer.usd_per_hour)}/h is above on-demand"
        case Drop.PRICE:
            return f"price {show(offer.usd_per_hour)}/h cannot be true; the catalogue does not know it"
        case Drop.HOURLY_LIMIT:
            limit = ask.spec.resources.max_usd_per_hour
            return f"{show(offer.usd_per_hour * ask.nodes)}/h is above max_usd_per_hour {limit}"
        case Drop.PREEMPTED_TOO_OFTEN:
            return f"preempted every {1 / rate / 60:.0f} min, and each time costs {kind.lost / 60:.0f} min"
        case Drop.DEADLINE:
            p50, p90, late = (s / 3600 for s in (kind.p50(rate), ask.p90(offer, kind), _late_s(ask, offer, kind)))
            return f"takes {p50:.2f} h (P50), {p90:.2f} h (P90): {late:.2f} h too long for the deadline or max_duration"
        case Drop.CAP:
            usd = _total(offer, kind, ask.nodes, rate, kind.p50(rate))
            return f"expected {show(usd)} to finish; {show(ask.cap_left)} of the cap is left"
        case Drop.UNAVAILABLE:
            return "the cloud has none now"
        case Drop.EXCLUDED:
            return ask.excluded.get(offer.id) or ask.excluded[offer.host_key]
    return kind.reason


def _notes(ask: Ask, offer: Offer, kind: Kind) -> str:
    notes = few(offer, kind)
    if hazard := basis(offer, ask.learned.spots):
        notes += f"; {hazard}"
    if kind.caps.self_stop == "none" and kind.caps.trust != "own":
        notes += "; it cannot stop itself: only its cloud's API ends the billing"
    return notes


class _Lines(Sequence[QuoteLine]):
    """Lines of a quote, each built when it is looked at. `order`: numbers of offers, `kept` kept ones first."""

    def __init__(
        self,
        ask: Ask,
        offers: Sequence[Offer],
        kinds: list[Kind],
        drops: list[Drop | None],
        micros: list[int],
        order: list[int],
    ) -> None:
        self._ask, self._offers, self._kinds = ask, offers, kinds
        self._drops, self._micros, self._order = drops, micros, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> QuoteLine: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[QuoteLine, ...]: ...
    def __getitem__(self, index: int | slice) -> QuoteLine | tuple[QuoteLine, ...]:
        if isinstance(index, slice):
            return tuple(self._line(number) for number in self._order[index])
        return self._line(self._order[index])

    def considered(self) -> Iterator[Considered]:
        """In short; an offer's dollars are those that `_assess` found, as they are in its line."""
        for number in self._order:
            offer, kind, drop = self._offers[number], self._kinds[number], self._drops[number]
            if drop is None:
                cost = _dollars(self._micros[number]) if kind.fit.pace else None
                reason = kind.reason + _notes(self._ask, offer, kind)
            else:
                cost, reason = None, _reason(self._ask, offer, kind, drop)
            yield Considered(offer.id, offer.usd_per_hour, drop, reason, cost)

    def _line(self, number: int) -> QuoteLine:
        offer, kind, drop = self._offers[number], self._kinds[number], self._drops[number]
        if drop is None:
            return _kept_line(self._ask, offer, kind)
        reason = _reason(self._ask, offer, kind, drop)
        return QuoteLine(offer=offer, verdict=Verdict.DROPPED, reason=reason, drop=drop, memory=kind.fit.memory)


def _kept_line(ask: Ask, offer: Offer, kind: Kind) -> QuoteLine:
    reason, pace, nodes = kind.reason + _notes(ask, offer, kind), kind.fit.pace, ask.nodes
    if pace is None:
        return QuoteLine(offer=offer, verdict=Verdict.KEPT, reason=reason, nodes=nodes)
    rate = ask.rate(offer)
    p50, p90 = kind.p50(rate), ask.p90(offer, kind)
    return QuoteLine(
        offer=offer,
        verdict=Verdict.KEPT,
        reason=reason,
        memory=kind.fit.memory,
        hours_p50=p50 / 3600,
        hours_p90=p90 / 3600,
        usd_p50=_total(offer, kind, nodes, rate, p50),
        usd_p90=_total(offer, kind, nodes, rate, p90),
        step_s=pace.step_s,
        evidence=pace.evidence,
        runs=pace.runs,
        nodes=nodes,
        plan=kind.fit.plan,
        hours=kind.hours(rate),
        costs=kind.costs(rate, float(offer.usd_per_hour) * nodes),
    )


def _assess_all(ask: Ask, offers: Sequence[Offer]) -> tuple[list[Kind], list[Drop | None], list[int]]:
    """Kind, drop and micro-dollars of every offer. Flat lists: 50,000 tuples would keep the garbage collector busy."""
    known: dict[object, Kind] = {}
    kinds: list[Kind] = []
    drops: list[Drop | None] = []
    micros: list[int] = []
    for offer in offers:
        machine = _MACHINE(offer)
        if offer.facts is not None:
            machine = (machine, line_key(offer.facts))
        if offer.emulated_on is not None or offer.reaches_local_files or not offer.gpus:
            machine = (machine, _HERE(offer))
        kind = known.get(machine)
        if kind is None:
            kind = known[machine] = _kind(ask, offer)
        drop, cost = _assess(ask, offer, kind) if kind.drop is None else (kind.drop, -1)
        kinds.append(kind)
        drops.append(drop)
        micros.append(cost)
    return kinds, drops, micros


def _keys(ask: Ask, offers: Sequence[Offer], kinds: list[Kind], micros: list[int]) -> Sequence[float]:
    """What offers are ranked by: less is better. Nothing is known of a script but prices."""
    objective = ask.spec.resources.objective
    if not ask.workload.shape or objective == "hourly":
        return [float(offer.usd_per_hour) for offer in offers]
    if objective == "cheapest":
        return micros
    seconds = [
        kind.p50(rate) if (rate := ask.rate(offer)) * kind.lost < 1 else inf
        for offer, kind in zip(offers, kinds, strict=True)
    ]
    if objective == "fastest":
        return seconds
    # One percent less money is worth one percent more time.
    return [cost * time for cost, time in zip(micros, seconds, strict=True)]


def _proposed_cap(spent: Decimal, p90: Decimal) -> Decimal:
    """Whole cents; a cap must be positive, also where the machine is free."""
    return max(CENT, (spent + p90 * CAP_MARGIN).quantize(CENT, rounding=ROUND_CEILING))


def _quote(ask: Ask, offers: Sequence[Offer], spent: Decimal) -> Quote:
    kinds, drops, micros = _assess_all(ask, offers)
    kept = [number for number, drop in enumerate(drops) if drop is None]
    keys = _keys(ask, offers, kinds, micros)
    order = rank(kept, keys, offers) + [number for number, drop in enumerate(drops) if drop is not None]
    lines = _Lines(ask, offers, kinds, drops, micros, order)
    p90 = lines[0].usd_p90 if kept else None
    cheapest = min(filter((-1).__lt__, micros), default=None)
    return Quote(
        lines=lines,
        considered=lines.considered,
        made_at=ask.now,
        expires_at=ask.now + LIFETIME,
        proposed_cap_usd=None if p90 is None else _proposed_cap(spent, p90),
        kept=len(kept),
        drops=Counter(drop for drop in drops if drop is not None),
        cheapest_usd=None if cheapest is None else _dollars(cheapest),
        unsold_regions=unsold(ask.regions, {offer.region for offer in offers}) if ask.regions else (),
    )


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
    learned: Experience = NOTHING,
) -> Quote:
    """Every offer once, kept ones first by the spec's objective (a script: by price), ties by offer id.

    `workload`: what is left to do. `local_files`: the blob store or the model is a folder of this machine.
    `scoped_store`: what the blob store grants reaches no more than the attempt's own part. `spent`, `cap_left`: dollars
    of this job. `excluded`: reasons by offer id or host key, e.g. sold out a moment ago.
    `caps`: by provider, for boot and teardown times and what its machines reach. `machine_s`: seconds for which the
    job's machines have stood. `lead_s`: of its time, a drain begins so long before the end, and the teardown earlier.
    `storage_usd_per_gib_month`: of the blob store. `learned`: what own runs say of speed, memory and preemptions.
    """
    ask = Ask(
        spec=spec, workload=workload, now=now, local_files=local_files, scoped_store=scoped_store, cap_left=cap_left,
        excluded=excluded, caps=caps, machine_s=machine_s, lead_s=lead_s, storage=float(storage_usd_per_gib_month),
        learned=learned,
    )  # fmt: skip
    return _quote(ask, offers, spent)
