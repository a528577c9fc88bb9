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


def price_changes(
    attempt: Attempt, seen: tuple[Observed, ...], now: datetime, born_after: Mapping[str, datetime]
) -> tuple[PriceChange, ...]:
    """What the cloud bills by now, where that is something else than is accrued; empty: nothing new is known.

    A rise counts from the last charge, before which the old price was seen, and a fall from now: never too little. A
    machine beside those that were bought counts from `born_after`, by its id, when it is known not to have stood yet;
    from the beginning where that is not known. Where one is missing instead, no price is known.
    """
    stand = [machine for machine in seen if machine.state is not InstanceState.GONE]
    if not stand:
        return ()
    begun, known = billed_since(attempt) or now, latest_price(attempt)
    price = _told_price(attempt, seen, known.usd_per_hour)
    births = _births(attempt, stand, begun, born_after)
    if len(births) < known.surplus:
        fell = PriceChange(since=now, usd_per_hour=price, surplus=len(births))
        return (*_moved(attempt, price, attempt.charged_to or begun), fell) if price > known.usd_per_hour else (fell,)
    moved = _moved(attempt, price, now if price < known.usd_per_hour else attempt.charged_to or begun)
    beside = with_surplus(attempt, (*attempt.prices, *moved), births) if len(births) > known.surplus else ()
    return (*moved, *beside)


def _moved(attempt: Attempt, price: Decimal, since: datetime) -> tuple[PriceChange, ...]:
    """That each machine costs so much from then on, but from no earlier than what is known already."""
    known = latest_price(attempt)
    if price == known.usd_per_hour:
        return ()
    since = max([since, *(one.since for one in attempt.prices)])
    return (replace(known, since=since, usd_per_hour=price),)


def with_surplus(attempt: Attempt, prices: Sequence[PriceChange], births: Sequence[datetime]) -> Iterator[PriceChange]:
    """From each of these births on one machine more, at what each machine cost then; what is accrued already of
    machines too many is theirs."""
    offered = PriceChange(since=attempt.created_at, usd_per_hour=attempt.line.offer.usd_per_hour)
    known = sorted(prices, key=partial(_order, attempt.line.nodes))
    for moment in sorted({*births, *(one.since for one in known if births and one.since > min(births))}):
        at = next((one for one in reversed(known) if one.since <= moment), offered)
        stood = sum(birth <= moment for birth in births)
        if stood > at.surplus:
            yield replace(at, since=moment, surplus=stood)


def _births(
    attempt: Attempt, stand: Sequence[Observed], begun: datetime, born_after: Mapping[str, datetime]
) -> list[datetime]:
    """Of each machine beside those that were bought, which need not stand any more themselves: the earliest that it
    may have come to stand. Where not all are recorded the youngest are too many."""
    recorded = {handle.id for handle in attempt.handles}
    others = sorted(max(begun, born_after.get(one.handle.id, begun)) for one in stand if one.handle.id not in recorded)
    surplus = max(len(stand) - attempt.line.nodes, len(others) if len(recorded) >= attempt.line.nodes else 0)
    return ([begun] * surplus + others)[len(others) :]


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
