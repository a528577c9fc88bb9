"""Which line of a quote to buy, or why nothing is bought and what becomes of the job."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from broker.domain.money import show
from broker.domain.offer import DropReason, Quote, QuoteLine
from broker.policy.budgets import Applied, Refusal, entry, gpu_room, judge, purchase
from broker.quote.summary import summary

PASSING = frozenset({DropReason.UNAVAILABLE, DropReason.EXCLUDED})
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
    passing = _passing(quote)
    if quote.drops.get(DropReason.CAP) and not passing and quote.cheapest_usd is not None:
        reason = (
            f"the cheapest finish is expected to cost {show(quote.cheapest_usd)} and {show(cap_left)} of the cap is "
            "left; raise the cap"
        )
        return Choice(line=None, reason=reason, queue=Queue.CAPPED)
    lead = "waits for capacity" if passing else "nothing fits"
    return Choice(line=None, reason=f"{lead}: {summary(quote)}", queue=Queue.WAIT)


def _kept(quote: Quote) -> Iterator[QuoteLine]:
    return (quote.lines[place] for place in range(quote.kept))


def _passing(quote: Quote) -> int:
    return sum(quote.drops.get(drop, 0) for drop in PASSING)


def choose(quote: Quote, *, cap_left: Decimal, attempt_number: int, least: Callable[[QuoteLine], Decimal]) -> Choice:
    """The cheapest line to finish of those that the cap would not end at once.

    `attempt_number`: of the attempt to be made, for the reason. `least`: see `billing.least_usd`.
    """
    if quote.best is None:
        return queue_verdict(quote, cap_left=cap_left)
    # Lines are built when they are looked at, and the first one nearly always does.
    best = next((line for line in _kept(quote) if least(line) < cap_left), None)
    if best is None:
        needed = min(least(line) for line in _kept(quote))
        reason = (
            f"{show(cap_left)} of the cap is left and a run that can still checkpoint and stop needs more than "
            f"{show(needed)}; raise the cap"
        )
        return Choice(line=None, reason=reason, queue=Queue.WAIT if _passing(quote) else Queue.CAPPED)
    offer = best.offer
    cost = f"{show(best.usd_p50)} expected to finish" if best.usd_p50 is not None else "time unknown"
    kind = "spot" if offer.spot else "on-demand"
    machines = f"{best.nodes} x " if best.nodes > 1 else ""
    return Choice(
        line=best,
        reason=f"attempt {attempt_number}: {machines}{offer.cloud} {offer.instance_type} {kind}, {offer.region}, "
        f"{show(offer.usd_per_hour)}/h, {cost}; {summary(quote)}",
    )


def foresee(
    quote: Quote,
    cap_usd: Decimal,
    applied: Sequence[Applied],
    now: datetime,
    *,
    least: Callable[[QuoteLine], Decimal],
    reserve: Callable[[QuoteLine], Decimal],
) -> Refusal | None:
    """What policies would do to a new job of that cap if it were admitted now, on the market as it was quoted.

    None: they would let it start, or nothing can be bought for other reasons. `least`: see `billing.least_usd`;
    `reserve`: see `billing.reserved`.
    """
    first = judge(entry(cap_usd, None), applied, now)
    if first is not None or not applied:
        return first
    lines = [line for line in _kept(quote) if least(line) < cap_usd]
    room = gpu_room(applied)
    # As placement does: what is larger than the room is not looked at. Where all is, the smallest says by how much.
    fits = (line for line in lines if room is None or line.offer.gpus * line.nodes <= room[0])
    line = next(fits, min(lines, key=lambda one: one.offer.gpus * one.nodes, default=None))
    return None if line is None else judge(purchase(line, reserve(line), cap_usd, None), applied, now)
