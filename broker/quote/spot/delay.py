"""Waits of a job without a deadline for sold-out spot: what an hour of delay is worth decides (`hour_worth_usd`).

The job waits until the wait has cost as much as spot would save, then it buys what is for sale. Such a wait costs at
most twice the cheapest choice in hindsight, however long spot is sold out (the rent-or-buy problem).
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from math import inf

from broker.domain.money import format_usd
from broker.domain.offer import DropReason, Quote, QuoteLine, SoldOutSpot
from broker.quote.offer_index import OfferIndex
from broker.quote.offer_rules import dollars
from broker.quote.request import QuoteRequest

WAIT_SHARE = Decimal("0.9")
"""A job waits only if spot is expected to cost at most this share of what is for sale."""
MIN_WAIT_S = 600.0
"""Shortest wait that is worth a new attempt. A saving that allows less is not waited for."""
MAX_WAIT_S = 10 * 365 * 86_400.0
"""Seconds above which a wait has no limit that is worth stating."""
_SOLD_OUT = frozenset({DropReason.UNAVAILABLE, DropReason.EXCLUDED})


def sold_out_spot(
    ask: QuoteRequest, index: OfferIndex, drops: Sequence[DropReason | None], micros: Sequence[int]
) -> SoldOutSpot | None:
    """Return the cheapest spot offer that is sold out; None: there is none, or the job does not wait for it.

    Offers that are excluded with their host or account do not count, because waiting may not end such an exclusion.
    """
    if ask.deadline_s < inf or not ask.workload.shape or ask.spec.resources.objective != "cheapest":
        return None
    numbers = [
        number
        for group in index.machines
        if group.like.spot
        for number in group.numbers
        if drops[number] in _SOLD_OUT
        and (index.offers[number].available is False or index.offers[number].id in ask.excluded)
    ]
    if not numbers:
        return None
    number = min(numbers, key=micros.__getitem__)
    return SoldOutSpot(
        offer_id=index.offers[number].id,
        usd_p50=dollars(micros[number]),
        hour_worth_usd=ask.spec.hour_worth_usd,
        waited_s=ask.waited_s,
    )


def delay_message(quote: Quote, best: QuoteLine) -> str | None:
    """Return the reason to wait for sold-out spot instead of buying `best`; None: buy it."""
    if best.offer.spot or best.usd_p50 is None or (spot := quote.sold_out_spot()) is None:
        return None
    if spot.usd_p50 > best.usd_p50 * WAIT_SHARE:
        return None
    limit_s = _limit_s(spot, best)
    if limit_s < MIN_WAIT_S or spot.waited_s >= limit_s:
        return None
    costs = f"{format_usd(spot.usd_p50)} expected to finish there, {format_usd(best.usd_p50)} on demand"
    if (until := wait_end(quote, best, spot)) is None:
        return f"waits for spot: {spot.offer_id} is sold out; {costs}; hour_worth_usd sets no limit"
    worth = f"an hour of delay is worth {format_usd(spot.hour_worth_usd)} (hour_worth_usd)"
    lead = f"waits for spot until {until:%Y-%m-%d %H:%MZ}, then buys on demand"
    return f"{lead}: {spot.offer_id} is sold out; {costs}; {worth}"


def wait_end(quote: Quote, best: QuoteLine, spot: SoldOutSpot) -> datetime | None:
    """Return the time at which a wait has cost as much as spot would save; None: there is no limit."""
    limit_s = _limit_s(spot, best)
    return None if limit_s > MAX_WAIT_S else quote.made_at + timedelta(seconds=limit_s - spot.waited_s)


def delay_usd(hour_worth_usd: Decimal, hours: float) -> Decimal:
    """Return what a delay is worth; a shorter time is worth nothing."""
    return hour_worth_usd * Decimal(repr(max(0.0, hours)))


def _limit_s(spot: SoldOutSpot, best: QuoteLine) -> float:
    """Return the longest wait that the saving of spot is worth."""
    if not spot.hour_worth_usd or best.usd_p50 is None:
        return inf
    return float((best.usd_p50 - spot.usd_p50) / spot.hour_worth_usd) * 3600
