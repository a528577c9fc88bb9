"""Chooses the line of a quote to buy, or says why nothing is bought and what happens to the job."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from itertools import chain

from broker.domain.money import format_usd
from broker.domain.offer import DropReason, Quote, QuoteLine
from broker.policy.budgets import Applied, Refusal, entry, free_gpus, judge, purchase
from broker.quote.spot.delay import delay_message
from broker.quote.summary import summary

PASSING = frozenset({DropReason.UNAVAILABLE, DropReason.EXCLUDED})
"""Drop reasons that pass by themselves."""


class Queue(StrEnum):
    """Next state of a job for which nothing is bought."""

    WAIT = "wait"
    """The job stays queued and shows the reason."""
    CAPPED = "capped"
    """Waiting cannot help: the rest of the cap is below the cheapest expected finish."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The line to buy, or the reason for buying none.

    `line` None: nothing is bought. `queue` is then the job's next state and `reason` explains it in one line.
    """

    line: QuoteLine | None
    reason: str
    queue: Queue | None = None


def queue_verdict(quote: Quote, *, cap_left: Decimal) -> Choice:
    """Return the choice for a quote that keeps no offer.

    The job is capped when only its cap excludes every offer that fits; otherwise it waits.
    """
    if not quote.lines:
        return Choice(line=None, reason="no offers: no provider answered yet, or none is configured", queue=Queue.WAIT)
    passing_count = _passing_count(quote)
    if quote.drops.get(DropReason.CAP) and not passing_count and quote.cheapest_usd is not None:
        cheapest, left = format_usd(quote.cheapest_usd), format_usd(cap_left)
        reason = f"the cheapest finish is expected to cost {cheapest} and {left} of the cap is left; raise the cap"
        return Choice(line=None, reason=reason, queue=Queue.CAPPED)
    lead = "waits for capacity" if passing_count else "nothing fits"
    return Choice(line=None, reason=f"{lead}: {summary(quote)}", queue=Queue.WAIT)


def _kept_lines(quote: Quote) -> Iterator[QuoteLine]:
    return (quote.lines[place] for place in range(quote.kept_count))


def _passing_count(quote: Quote) -> int:
    return sum(quote.drops.get(drop, 0) for drop in PASSING)


def _wait_reason(quote: Quote) -> str | None:
    """Return the reason to wait for a spot offer instead of buying on demand; None: buy."""
    outlook = quote.spot_outlook
    if outlook is None or outlook.action != "wait" or outlook.wait_usd is None:
        return None
    instead = (
        "on demand could be late" if outlook.demand_usd is None else f"{format_usd(outlook.demand_usd)} on demand now"
    )
    return (
        f"waits for spot until {outlook.until:%Y-%m-%d %H:%MZ} at the latest, then buys on demand: "
        f"{outlook.offer_id} is sold out; {format_usd(outlook.wait_usd)} expected to finish with the wait, {instead}"
    )


def choose(
    quote: Quote, *, cap_left: Decimal, attempt_number: int, min_budget: Callable[[QuoteLine], Decimal]
) -> Choice:
    """Return the line of the spot policy or the cheapest to finish, among lines that the cap would not end at once.

    The choice may be a wait for spot. A wait ends early enough for the deadline, or once it has cost more than spot
    saves (`hour_worth_usd`). `attempt_number`: number of the attempt to buy, for the reason. `min_budget`: see
    `billing.caps.min_budget_usd`.
    """
    if quote.best is None:
        return queue_verdict(quote, cap_left=cap_left)
    # Lines are built on access, and the first one nearly always satisfies the cap.
    preferred = quote.preferred_line()
    ranked = _kept_lines(quote) if preferred is None else chain([preferred], _kept_lines(quote))
    best = next((line for line in ranked if min_budget(line) < cap_left), None)
    if best is None:
        needed = min(min_budget(line) for line in _kept_lines(quote))
        reason = (
            f"{format_usd(cap_left)} of the cap is left and a run that can still checkpoint and stop needs more than "
            f"{format_usd(needed)}; raise the cap"
        )
        return Choice(line=None, reason=reason, queue=Queue.WAIT if _passing_count(quote) else Queue.CAPPED)
    if (waiting := _wait_reason(quote) or delay_message(quote, best)) is not None:
        return Choice(line=None, reason=waiting, queue=Queue.WAIT)
    offer = best.offer
    cost = f"{format_usd(best.usd_p50)} expected to finish" if best.usd_p50 is not None else "time unknown"
    kind = "spot" if offer.spot else "on-demand"
    machines = f"{best.nodes} x " if best.nodes > 1 else ""
    return Choice(
        line=best,
        reason=f"attempt {attempt_number}: {machines}{offer.cloud} {offer.instance_type} {kind}, {offer.region}, "
        f"{format_usd(offer.usd_per_hour)}/h, {cost}; {summary(quote)}",
    )


def foresee(
    quote: Quote,
    cap_usd: Decimal,
    applied: Sequence[Applied],
    now: datetime,
    *,
    min_budget: Callable[[QuoteLine], Decimal],
    reserve: Callable[[QuoteLine], Decimal],
) -> Refusal | None:
    """Return the refusal that policies would give a new job with this cap now; None: none.

    None also means that nothing can be bought for other reasons. `min_budget`: see
    `billing.caps.min_budget_usd`; `reserve`: see `billing.caps.reserved`.
    """
    entry_refusal = judge(entry(cap_usd, None), applied, now)
    if entry_refusal is not None or not applied:
        return entry_refusal
    lines = [line for line in _kept_lines(quote) if min_budget(line) < cap_usd]
    free_gpu_limit = free_gpus(applied)
    # Placement also skips lines with too many GPUs. If all have too many, the smallest one shows the excess.
    fits = (line for line in lines if free_gpu_limit is None or line.offer.gpus * line.nodes <= free_gpu_limit[0])
    line = next(fits, min(lines, key=lambda line: line.offer.gpus * line.nodes, default=None))
    return None if line is None else judge(purchase(line, reserve(line), cap_usd, None), applied, now)
