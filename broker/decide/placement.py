"""Which line of a quote to buy, or why nothing is bought and what becomes of the job."""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from broker.decide.quote import summary
from broker.domain.money import show
from broker.domain.offer import Drop, Quote, QuoteLine

PASSING = frozenset({Drop.UNAVAILABLE, Drop.EXCLUDED})
"""Reasons that end by themselves."""


class Queue(StrEnum):
    """What becomes of a job for which nothing is bought."""

    WAIT = "wait"
    """Stays queued with the reason shown."""
    CAPPED = "capped"
    """No waiting helps: what is left of the cap is below the cheapest finish."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`line` is what to buy; None: nothing, then `queue` says what becomes of the job, `reason` why, in one line."""

    line: QuoteLine | None
    reason: str
    queue: Queue | None = None


def queue_verdict(quote: Quote, *, cap_left: Decimal) -> Choice:
    """For a quote that keeps nothing: wait, or capped when only the cap speaks against every offer that fits."""
    if not quote.lines:
        return Choice(line=None, reason="no offers: no provider answered yet, or none is configured", queue=Queue.WAIT)
    passing = sum(quote.drops.get(drop, 0) for drop in PASSING)
    if quote.drops.get(Drop.CAP) and not passing and quote.cheapest_usd is not None:
        reason = (
            f"the cheapest finish is expected to cost {show(quote.cheapest_usd)} and {show(cap_left)} of the cap is "
            "left; raise the cap"
        )
        return Choice(line=None, reason=reason, queue=Queue.CAPPED)
    lead = "waits for capacity" if passing else "nothing fits"
    return Choice(line=None, reason=f"{lead}: {summary(quote)}", queue=Queue.WAIT)


def choose(quote: Quote, *, cap_left: Decimal, attempt_number: int) -> Choice:
    """The cheapest line to finish. `attempt_number`: of the attempt to be made, for the reason."""
    best = quote.best
    if best is None:
        return queue_verdict(quote, cap_left=cap_left)
    offer = best.offer
    cost = f"{show(best.usd_p50)} expected to finish" if best.usd_p50 is not None else "time unknown"
    kind = "spot" if offer.spot else "on-demand"
    return Choice(
        line=best,
        reason=f"attempt {attempt_number}: {offer.cloud} {offer.instance_type} {kind}, {offer.region}, "
        f"{show(offer.usd_per_hour)}/h, {cost}; {summary(quote)}",
    )
