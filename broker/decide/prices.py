"""What the machines of an attempt cost an hour, and from when on; prices move, and a machine too many bills as well."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial

from broker.decide.liveness import dearer
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, PriceChange
from broker.domain.money import ZERO, usd
from broker.domain.offer import Offer


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
    return change.usd_per_hour * (nodes + change.surplus)


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


def price_change(
    attempt: Attempt, seen: tuple[Observed, ...], now: datetime, born_after: Mapping[str, datetime]
) -> PriceChange | None:
    """What the cloud bills by now, where that is something else than is accrued; None: nothing new is known.

    A rise counts from the last charge, before which the old price was seen, and a fall from now: never too little. A
    machine beside those that were bought counts from `born_after`, by its id, when it is known not to have stood yet;
    from the beginning where that is not known. Where one is missing instead, no price is known.
    """
    stand, nodes = [machine for machine in seen if machine.state is not InstanceState.GONE], attempt.line.nodes
    if not stand:
        return None
    known = latest_price(attempt)
    price, surplus = _told_price(attempt, seen, known.usd_per_hour), _surplus(attempt, stand)
    if surplus > known.surplus:  # it counts from before now; a price that has fallen is seen at the next look
        price = max(price, known.usd_per_hour)
    if (price, surplus) == (known.usd_per_hour, known.surplus):
        return None
    told = PriceChange(since=now, usd_per_hour=price, surplus=surplus)
    if _rate(nodes, told) < _rate(nodes, known):
        return told
    begun = billed_since(attempt) or now
    since = attempt.charged_to or begun
    if surplus > known.surplus:
        since = max(begun, min(since, _first_surplus(attempt, stand, surplus, born_after) or begun))
    return replace(told, since=max([since, *(one.since for one in attempt.prices)]))


def _surplus(attempt: Attempt, stand: Sequence[Observed]) -> int:
    """Machines that stand beside those that were bought, which need not stand any more themselves."""
    recorded = {handle.id for handle in attempt.handles}
    others = sum(machine.handle.id not in recorded for machine in stand) if len(recorded) >= attempt.line.nodes else 0
    return max(len(stand) - attempt.line.nodes, others, 0)


def _first_surplus(
    attempt: Attempt, stand: Sequence[Observed], surplus: int, born_after: Mapping[str, datetime]
) -> datetime | None:
    """When the oldest of the machines too many may have come to stand: of those that are not recorded the youngest.
    None: not known."""
    recorded = {handle.id for handle in attempt.handles}
    others = {machine.handle.id for machine in stand} - recorded
    known = sorted(born_after[one] for one in others & born_after.keys())
    return known[-surplus] if surplus <= len(known) else None


def _told_price(attempt: Attempt, seen: tuple[Observed, ...], known: Decimal) -> Decimal:
    """Of one machine. A price that does not move by itself is not believed to have fallen below the offer's, which may
    hold the disk too."""
    told = [machine.usd_per_hour for machine in seen if machine.usd_per_hour is not None]
    if len(told) < attempt.line.nodes:
        return known
    price, offered = usd(max(told)), attempt.line.offer.usd_per_hour
    if not all(machine.price_moves for machine in seen) and not dearer(price, attempt.line.offer):
        price = offered
    return known if price < 0 else price
