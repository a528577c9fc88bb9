"""Hourly prices of an attempt's machines over time; prices move, and extra machines bill as well."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, PriceChange
from broker.domain.money import ZERO, usd
from broker.domain.offer import Offer


@dataclass(frozen=True, kw_only=True)
class MachineSpan:
    """Lifetime of one machine that was listed under an attempt's name."""

    id: str
    since: datetime | None
    """Latest time at which the machine was known to be absent; None: unknown."""
    shown: datetime
    """Time of the first listing that showed it."""
    until: datetime | None
    """Time of the first listing without it; None: it may still run."""


def billed_since(attempt: Attempt) -> datetime | None:
    """Return the start of billing; None: the create was not sent.

    It is the time of the create. For a cloud that bills from running on, it is `running_at` once that is known.
    """
    runs = attempt.running_at if attempt.line.offer.billed_from == "running" else None
    return runs or attempt.create_sent_at


def spans(
    attempt: Attempt, since: datetime, lasted: timedelta, expected: tuple[PriceChange, ...] = ()
) -> Iterator[tuple[Decimal, timedelta, timedelta]]:
    """Yield (dollars an hour of all machines, from, to) after the start of billing, in order and without gaps.

    `expected`: price changes that count in addition to the attempt's own.
    """
    rate, begins = attempt.line.offer.usd_per_hour * attempt.line.nodes, timedelta(0)
    for change in sorted((*attempt.prices, *expected), key=partial(_order, attempt.line.nodes)):
        ends = min(max(change.since - since, timedelta(0)), lasted)
        if ends > begins:
            yield rate, begins, ends
        rate, begins = _rate(attempt.line.nodes, change), ends
    if lasted > begins:
        yield rate, begins, lasted


def _rate(nodes: int, change: PriceChange) -> Decimal:
    """Return dollars an hour of all machines."""
    return change.usd_per_hour * (nodes + change.extra_machines)


def _order(nodes: int, change: PriceChange) -> tuple[datetime, Decimal]:
    return change.since, _rate(nodes, change)


def latest_price(attempt: Attempt) -> PriceChange:
    """Return the price last read from the cloud, or the offer's price before that."""
    offered = PriceChange(since=attempt.created_at, usd_per_hour=attempt.line.offer.usd_per_hour)
    return max(attempt.prices, key=partial(_order, attempt.line.nodes), default=offered)


def price_now(attempt: Attempt) -> Decimal:
    """Return dollars an hour of one machine, as last read from the cloud."""
    return latest_price(attempt).usd_per_hour


def ceiling(offer: Offer, price: Decimal) -> Decimal:
    """Return the highest price before the next check: a moving spot price rises to on-demand at most."""
    return max(price, offer.on_demand_usd_per_hour or ZERO) if offer.price_moves else price


def price_changes(
    attempt: Attempt, listed: tuple[Observed, ...], now: datetime, spans_listed: Sequence[MachineSpan]
) -> tuple[PriceChange, ...]:
    """Return the changes of price or number of machines that `attempt.prices` lacks; empty: nothing has changed.

    `listed`: machines of a recent listing, including machines that are gone. `spans_listed`: all machines ever listed
    under the name. A rise counts from the last charge, because the old price was observed before it. A fall counts from
    now, so that the accrual is never too low. An extra machine counts for its lifetime, even if it came and went
    between two charges.
    """
    existing = [machine for machine in listed if machine.state is not InstanceState.GONE]
    lives = [_with_minimum(attempt, machine, now) for machine in spans_listed]
    changes: tuple[PriceChange, ...] = ()
    if existing:
        price = _reported_price(attempt, existing, price_now(attempt))
        extra = 0 if _as_bought(attempt, lives) else _ExtraMachines(attempt, lives).at(now)
        changes = _changes_now(attempt, price, now, extra)
    return (*changes, *extra_machine_changes(attempt, (*attempt.prices, *changes), lives))


def _changes_now(attempt: Attempt, price: Decimal, now: datetime, extra: int) -> tuple[PriceChange, ...]:
    """Return the change of the machine price, and a change to fewer extra machines."""
    latest, before = latest_price(attempt), attempt.charged_to or billed_since(attempt) or now
    fewer = extra < latest.extra_machines
    changes = []
    if price > latest.usd_per_hour or (price < latest.usd_per_hour and not fewer):
        since = now if price < latest.usd_per_hour else before
        since = max([since, *(change.since for change in attempt.prices)])  # after all recorded changes
        changes.append(replace(latest, since=since, usd_per_hour=price))
    if fewer:
        changes.append(PriceChange(since=now, usd_per_hour=price, extra_machines=extra))
    return tuple(changes)


def extra_machine_changes(
    attempt: Attempt, prices: Sequence[PriceChange], machines: Sequence[MachineSpan]
) -> tuple[PriceChange, ...]:
    """Return the changes that `prices` lacks for extra machines, each at the price of its time.

    Extra machines that `prices` already contains are credited. Example with one machine bought at $0.36, a second one
    that existed from 30 to 90 and a third one from 50 to 70:

    | from | machines | extra | change           |
    |------|----------|-------|------------------|
    | 0    | 1        | 0     | none             |
    | 30   | 2        | 1     | $0.36, one extra |
    | 50   | 3        | 2     | $0.36, two extra |
    | 70   | 2        | 1     | $0.36, one extra |
    | 90   | 1        | 0     | $0.36, no extra  |
    """
    if _as_bought(attempt, machines):
        return ()
    extra_machines = _ExtraMachines(attempt, machines)
    machines = [_as_recorded(prices, extra_machines, machine, attempt) for machine in machines]
    extra_machines = _ExtraMachines(attempt, machines)
    price, changes, raised = latest_price(replace(attempt, prices=())), [], 0
    later = deque(sorted(prices, key=partial(_order, attempt.line.nodes)))
    for moment in _moments(attempt, prices, machines):
        while later and later[0].since <= moment:
            price = later.popleft()
        extra = max(price.extra_machines, extra_machines.at(moment))
        in_effect = price.extra_machines if price.since == moment else raised or price.extra_machines
        if extra != in_effect:
            changes.append(replace(price, since=moment, extra_machines=extra))
        raised = extra if extra > price.extra_machines else 0
    return tuple(changes)


def _as_bought(attempt: Attempt, machines: Sequence[MachineSpan]) -> bool:
    """Return True if only recorded machines were ever listed, and no more than were bought."""
    recorded = {handle.id for handle in attempt.handles}
    return len(machines) <= attempt.line.nodes and all(machine.id in recorded for machine in machines)


def _moments(attempt: Attempt, prices: Sequence[PriceChange], machines: Sequence[MachineSpan]) -> Sequence[datetime]:
    """Return the times at which price or number of machines may change, none before the start of billing."""
    start = billed_since(attempt)
    if start is None:
        return ()
    times = [time for machine in machines for time in (machine.since, machine.shown, machine.until) if time is not None]
    times += [change.since for change in prices]
    return sorted({start, *(max(start, time) for time in times)})


def _with_minimum(attempt: Attempt, machine: MachineSpan, now: datetime) -> MachineSpan:
    """Return the span extended to the cloud's minimum bill. Until that time is over, the machine counts as running."""
    if machine.until is None:
        return machine
    until = max(machine.until, machine.shown + timedelta(seconds=attempt.line.offer.billing_minimum_s))
    return replace(machine, until=until if until <= now else None)


def _as_recorded(
    prices: Sequence[PriceChange], extra_machines: "_ExtraMachines", machine: MachineSpan, attempt: Attempt
) -> MachineSpan:
    """Return the span, starting at its first listing if `prices` already counts the extra machines at that time.

    The broker that recorded them knew the creation time better, so nothing is billed before the first listing.
    """
    latest = latest_price(replace(attempt, prices=tuple(change for change in prices if change.since <= machine.shown)))
    is_recorded = 0 < extra_machines.at(machine.shown) <= latest.extra_machines
    return replace(machine, since=machine.shown) if is_recorded else machine


class _ExtraMachines:
    """Number of extra machines over time, from a sweep over (time, +1 or -1) events of machine spans.

    Machines above the number bought are extra. Once all bought machines are recorded and the first of them has started,
    every unrecorded machine is extra, even after all recorded machines have ended.
    """

    def __init__(self, attempt: Attempt, machines: Sequence[MachineSpan]) -> None:
        recorded, nodes = {handle.id for handle in attempt.handles}, attempt.line.nodes
        starts = [_start(attempt, machine) for machine in machines if machine.id in recorded]
        complete_at = min(starts, default=None)
        total = unrecorded = 0
        self._times: list[datetime] = []
        self._counts: list[int] = []
        for time, change, is_unrecorded in sorted(_events(attempt, machines, recorded, complete_at)):
            total, unrecorded = total + change, unrecorded + change * is_unrecorded
            is_complete = len(recorded) >= nodes and (complete_at is None or complete_at <= time)
            self._times.append(time)
            self._counts.append(max(0, total - nodes, unrecorded if is_complete else 0))

    def at(self, moment: datetime) -> int:
        """Return the number of extra machines at a moment."""
        position = bisect_right(self._times, moment)
        return self._counts[position - 1] if position else 0


def _events(
    attempt: Attempt, machines: Sequence[MachineSpan], recorded: set[str], complete_at: datetime | None
) -> Iterator[tuple[datetime, int, bool]]:
    """Yield (time, change of the number of machines, True for an unrecorded machine) in any order."""
    if complete_at is not None:
        yield complete_at, 0, False
    for machine in machines:
        start = _start(attempt, machine)
        if machine.until is None or start < machine.until:
            yield start, 1, machine.id not in recorded
            if machine.until is not None:
                yield machine.until, -1, machine.id not in recorded


def _start(attempt: Attempt, machine: MachineSpan) -> datetime:
    return machine.since or billed_since(attempt) or machine.shown


def _reported_price(attempt: Attempt, machines: Sequence[Observed], known_usd: Decimal) -> Decimal:
    """Return the price of one machine, the mean of several.

    A fixed price below the offer's is not believed, because the offer may include the disk. A fall is not believed
    until all machines report a price.
    """
    reported = [machine.usd_per_hour for machine in machines if machine.usd_per_hour is not None]
    if not reported:
        return known_usd
    price, offered = usd(sum(reported, ZERO) / len(reported)), attempt.line.offer.usd_per_hour
    if all(machine.price_moves for machine in machines):
        price += attempt.line.offer.added_disk_usd_per_hour  # a market price has a disk of the usual size
    elif not exceeds_offer_price(price, attempt.line.offer):
        price = offered
    return known_usd if price < 0 or (len(reported) < attempt.line.nodes and price < known_usd) else price


PRICE_SLACK, PRICE_SLACK_USD = Decimal("1.01"), Decimal("0.001")
"""Allowance for rounding; a higher price belongs to another machine than the one bought."""


def exceeds_offer_price(price: Decimal, offer: Offer) -> bool:
    """Return True if the price is above the offer's by more than rounding."""
    return price > offer.usd_per_hour * PRICE_SLACK + PRICE_SLACK_USD
