"""Scores hosts by the attempts that failed on them, and decides how long a host is avoided.

Each bad end of an attempt counts by its kind, and half as much after each half-life:

score = Σ weight × 2^(-age / half-life)

A host that reaches 0.9 is avoided until the score has fallen to 0.25, a week at most. The physical host is scored if
its cloud names it, otherwise the offer. The machines of an offer change with the market, so its half-life is short and
preemptions do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp2, log2

from broker.domain.job import Attempt, Reason

WEIGHTS = {
    # The machine was not as sold: one case suffices.
    Reason.MISMATCH: 1.0,
    # Set-up failed, no heartbeat, or silence: our network or image may be at fault, so one case does not suffice.
    Reason.INFRASTRUCTURE: 0.5,
    Reason.HUNG: 0.5,
    # Preempted soon after the purchase; later preemptions are normal for spot.
    Reason.PREEMPTED: 0.4,
}
UNFIT = 1.0
"""Weight of a machine that the trainer has checked and found unusable."""
EARLY_S = 900.0
HALF_LIFE_S, OFFER_HALF_LIFE_S = 86_400.0, 3600.0
LIMIT, FORGIVEN = 0.9, 0.25
MAX_BLOCK_S = 7 * 86_400.0
MEMORY_S = 7 * 86_400.0
"""Age in seconds after which an end is ignored: its weight has decayed to less than a hundredth."""
MAX_ATTEMPTS = 50
"""Maximum number of attempts that are read for one host."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A host that is avoided for a while."""

    for_s: float
    reason: str


def weight(attempt: Attempt) -> float:
    """Return the weight of an ended attempt against its host at the moment of its end; 0: none."""
    if attempt.reason is Reason.PREEMPTED:
        sent, ended = attempt.create_sent_at, attempt.terminating_since
        early = sent is not None and ended is not None and (ended - sent).total_seconds() < EARLY_S
        if not (early and attempt.line.offer.names_host):
            return 0.0
    if attempt.final is not None and attempt.final.bad_host:
        return UNFIT
    return WEIGHTS.get(attempt.reason, 0.0) if attempt.reason else 0.0


def score(history: Sequence[Attempt], now: datetime) -> float:
    """Return the score of a host from its ended attempts.

    An end in the future (another broker's clock) counts as now.
    """
    return sum(weight(attempt) * exp2(-_age_s(attempt, now) / _half_life_s(attempt)) for attempt in history)


def judge_host(history: Sequence[Attempt], now: datetime) -> Block | None:
    """Return the block after the latest attempt, which is the first of `history`; None: the host is not avoided."""
    if not history or not weight(history[0]):
        return None
    current = score(history, now)
    if current < LIMIT:
        return None
    for_s = min(MAX_BLOCK_S, _half_life_s(history[0]) * log2(current / FORGIVEN))
    times = sum(1 for attempt in history if weight(attempt))
    last = history[0].detail or (history[0].reason.value if history[0].reason else "")
    return Block(for_s=for_s, reason=f"avoided for {for_s / 3600:.0f} h, failed {times} x: {last}")


def _age_s(attempt: Attempt, now: datetime) -> float:
    return max(0.0, (now - (attempt.ended_at or now)).total_seconds())


def _half_life_s(attempt: Attempt) -> float:
    return HALF_LIFE_S if attempt.line.offer.names_host else OFFER_HALF_LIFE_S
