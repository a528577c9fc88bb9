"""What the machines of an attempt cost an hour, and from when on; prices move, and a machine too many bills as well."""

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
    """A machine that was listed under an attempt's name. `since`: when it did not stand yet; None: that is not known.
    `shown`: when it was listed first. `until`: by when it was listed no more; None: it may stand.
    """

    id: str
    since: datetime | None
    shown: datetime
    until: datetime | None


def billed_since(attempt: Attempt) -> datetime | None:
    """The create, also for what is billed from running while it is not known to run; None: it was not sent."""
    runs = attempt.running_at if attempt.line.offer.billed_from == "running" else None
    return runs or attempt.create_sent_at


def spans(attempt: Attempt, since: datetime, lasted: timedelta) -> Iterator[tuple[Decimal, timedelta, timedelta]]:
    """(dollars an hour of all machines, from, to) after the start of billing, in order and without gaps."""
    rate, begins = attempt.line.offer.usd_per_hour * attempt.line.nodes, timedelta(0)
    for change in sorted(attempt.prices, key=partial(_order, attempt.line.nodes)):
        ends = min(max(change.since - since, timedelta(0)), lasted)
        if ends > begins:
            yield rate, begins, ends
        rate, begins = _rate(attempt.line.nodes, change), ends
    if lasted > begins:
        yield rate, begins, lasted


def _rate(nodes: int, change: PriceChange) -> Decimal:
    """Dollars an hour of all machines."""
    return change.usd_per_hour * (nodes + change.extra_machines)


def _order(nodes: int, change: PriceChange) -> tuple[datetime, Decimal]:
    return change.since, _rate(nodes, change)


def latest_price(attempt: Attempt) -> PriceChange:
    """As last read back; before that as offered."""
    offered = PriceChange(since=attempt.created_at, usd_per_hour=attempt.line.offer.usd_per_hour)
    return max(attempt.prices, key=partial(_order, attempt.line.nodes), default=offered)


def price_now(attempt: Attempt) -> Decimal:
    """Dollars an hour of one machine, as last read back."""
    return latest_price(attempt).usd_per_hour


def ceiling(offer: Offer, price: Decimal) -> Decimal:
    """The most that the price may become before the next look: a spot price that moves ends at on-demand."""
    return max(price, offer.on_demand_usd_per_hour or ZERO) if offer.price_moves else price


def price_changes(
    attempt: Attempt, seen: tuple[Observed, ...], now: datetime, stood: Sequence[MachineSpan]
) -> tuple[PriceChange, ...]:
    """What the cloud bills by now, where that is something else than is accrued; empty: nothing new is known.

    `seen`: by a listing that is young enough, gone ones included. A rise counts from the last charge, before which the
    old price was seen, and a fall from now: never too little. Where a machine is missing, no price is known. `stood`:
    what has been listed under the name; those beside the ones that were bought count for as long as they stood, also
    where they came and went unseen by any charge.
    """
    stand = [machine for machine in seen if machine.state is not InstanceState.GONE]
    stood = [_billed(attempt, one, now) for one in stood]
    moved: tuple[PriceChange, ...] = ()
    if stand:
        moved = _moved(
            attempt, _told_price(attempt, stand, price_now(attempt)), now, _extra_machines_at(attempt, stood, now)
        )
    return (*moved, *extra_machine_changes(attempt, (*attempt.prices, *moved), stood))


def _moved(attempt: Attempt, price: Decimal, now: datetime, extra_machines: int) -> tuple[PriceChange, ...]:
    """That each machine costs so much, and that no more than so many stand beside those that were bought."""
    known, before = latest_price(attempt), attempt.charged_to or billed_since(attempt) or now
    fewer = extra_machines < known.extra_machines
    found = []
    if price > known.usd_per_hour or (price < known.usd_per_hour and not fewer):
        since = now if price < known.usd_per_hour else before
        since = max([since, *(one.since for one in attempt.prices)])  # no earlier than what is known already
        found.append(replace(known, since=since, usd_per_hour=price))
    if fewer:
        found.append(PriceChange(since=now, usd_per_hour=price, extra_machines=extra_machines))
    return tuple(found)


def extra_machine_changes(
    attempt: Attempt, prices: Sequence[PriceChange], stood: Sequence[MachineSpan]
) -> tuple[PriceChange, ...]:  # fmt: skip
    """What `prices` lack of machines beside those that were bought, while they stood, at what each machine cost then;
    what is accrued already of machines too many is theirs. Where it was so when one was first listed, somebody has told
    of it who knew when it came: so before that it counts no more.
    """
    if _as_bought(attempt, stood):
        return ()
    stood = [_told_of(attempt, prices, stood, one) for one in stood]
    known, found, raised = latest_price(replace(attempt, prices=())), [], 0
    later = deque(sorted(prices, key=partial(_order, attempt.line.nodes)))
    for moment in _moments(attempt, prices, stood):
        while later and later[0].since <= moment:
            known = later.popleft()
        extra_machines = max(known.extra_machines, _extra_machines_at(attempt, stood, moment))
        in_effect = known.extra_machines if known.since == moment else raised or known.extra_machines
        if extra_machines != in_effect:
            found.append(replace(known, since=moment, extra_machines=extra_machines))
        raised = extra_machines if extra_machines > known.extra_machines else 0
    return tuple(found)


def _as_bought(attempt: Attempt, stood: Sequence[MachineSpan]) -> bool:
    """No more machines were ever listed than were bought, and no others."""
    recorded = {handle.id for handle in attempt.handles}
    return len(stood) <= attempt.line.nodes and all(one.id in recorded for one in stood)


def _moments(attempt: Attempt, prices: Sequence[PriceChange], stood: Sequence[MachineSpan]) -> Sequence[datetime]:
    """When the price or the number of machines may have changed; never before it is billed."""
    begun = billed_since(attempt)
    if begun is None:
        return ()
    ends = (moment for one in stood for moment in (one.since, one.shown, one.until) if moment is not None)
    return sorted({begun, *(max(begun, moment) for moment in (*ends, *(one.since for one in prices)))})


def _billed(attempt: Attempt, one: MachineSpan, now: datetime) -> MachineSpan:
    """For no less than its cloud bills at the least; as if it stood while that is not over."""
    if one.until is None:
        return one
    until = max(one.until, one.shown + timedelta(seconds=attempt.line.offer.billing_minimum_s))
    return replace(one, until=until if until <= now else None)


def _told_of(
    attempt: Attempt, prices: Sequence[PriceChange], stood: Sequence[MachineSpan], one: MachineSpan
) -> MachineSpan:
    known = latest_price(replace(attempt, prices=tuple(price for price in prices if price.since <= one.shown)))
    return (
        replace(one, since=one.shown)
        if 0 < _extra_machines_at(attempt, stood, one.shown) <= known.extra_machines
        else one
    )


def _extra_machines_at(attempt: Attempt, stood: Sequence[MachineSpan], moment: datetime) -> int:
    """Machines beside those that were bought, which need not stand any more themselves once they have come."""
    there = [one.id for one in stood if _since(attempt, one) <= moment and (one.until is None or moment < one.until)]
    recorded = {handle.id for handle in attempt.handles}
    came = min((_since(attempt, one) for one in stood if one.id in recorded), default=moment)
    complete = len(recorded) >= attempt.line.nodes and came <= moment
    return max(0, len(there) - attempt.line.nodes, sum(own not in recorded for own in there) if complete else 0)


def _since(attempt: Attempt, one: MachineSpan) -> datetime:
    return one.since or billed_since(attempt) or one.shown


def _told_price(attempt: Attempt, seen: Sequence[Observed], known: Decimal) -> Decimal:
    """Of one machine, the mean of several. One that does not move by itself is not believed to have fallen below the
    offer's, which may hold the disk too; and none to have fallen while not all machines tell.
    """
    told = [machine.usd_per_hour for machine in seen if machine.usd_per_hour is not None]
    if not told:
        return known
    price, offered = usd(sum(told, ZERO) / len(told)), attempt.line.offer.usd_per_hour
    if not all(machine.price_moves for machine in seen) and not exceeds_offer_price(price, attempt.line.offer):
        price = offered
    return known if price < 0 or (len(told) < attempt.line.nodes and price < known) else price


PRICE_SLACK, PRICE_SLACK_USD = Decimal("1.01"), Decimal("0.001")
"""A bill above the offer by more than rounding is another machine than the one that was bought."""


def exceeds_offer_price(price: Decimal, offer: Offer) -> bool:
    """Above what was bought by more than rounding."""
    return price > offer.usd_per_hour * PRICE_SLACK + PRICE_SLACK_USD
