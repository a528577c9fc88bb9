"""What an attempt costs, and when its job must drain so that the cap holds."""

from datetime import datetime, timedelta
from decimal import Decimal

from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Job
from broker.domain.money import ZERO, usd
from broker.domain.offer import Offer

HOUR = Decimal(3600)
LEAST_DRAIN_S = 30.0
"""The request has to be noticed and a step to be ended, however quick the last save was."""


def accrued(attempt: Attempt, until: datetime) -> Decimal:
    """Dollars from the start of billing to `until`, in the provider's quantum rounded up; in every state alike."""
    since = _billed_since(attempt)
    if since is None or until <= since:
        return ZERO
    least = timedelta(seconds=attempt.line.offer.billing_minimum_s if attempt.handles else 0)
    return _cost(attempt.line.offer, attempt.line.nodes, max(until - since, least))


def _billed_since(attempt: Attempt) -> datetime | None:
    """The create, also for what is billed from running while it is not known to run; None: it was not sent."""
    runs = attempt.running_at if attempt.line.offer.billed_from == "running" else None
    return runs or attempt.create_sent_at


def runs_since(attempt: Attempt, not_yet: datetime | None, caps: Caps) -> datetime:
    """`running_at` of an attempt with a machine that is no longer starting: never later than the cloud's own start.

    `not_yet`: when the last listing began that showed its machines starting or not at all; None: nobody looked.
    """
    sent = attempt.create_sent_at or attempt.created_at
    return sent if not_yet is None else max(sent, not_yet - timedelta(seconds=caps.list_lag_s))


def _cost(offer: Offer, nodes: int, lasted: timedelta) -> Decimal:
    """Of all machines, in whole quanta, rounded up."""
    whole, rest = divmod(lasted, timedelta(seconds=offer.billing_quantum_s))
    return usd(offer.usd_per_hour * nodes * ((whole + bool(rest)) * offer.billing_quantum_s) / HOUR)


def owed(attempt: Attempt, until: datetime) -> Decimal:
    """What is still to be charged up to `until`; never negative, also when a clock went backwards."""
    return max(ZERO, accrued(attempt, until) - attempt.charged_usd)


def billed_until(attempt: Attempt, now: datetime, behind_s: float) -> datetime:
    """Up to when an attempt is charged now. What is being destroyed is charged `behind_s` late, as long as a proof of
    its absence takes: nothing is charged that the proof then takes back."""
    if attempt.absent_at is not None:
        return min(now, attempt.absent_at)
    return now - timedelta(seconds=behind_s) if attempt.state is AttemptState.TERMINATING else now


def capped_drain_s(attempt: Attempt, drain_s: float) -> float:
    """Seconds that a drain for the cap may take: three times the last save where there is one, else `drain_s`."""
    saved = attempt.beat.checkpoint if attempt.beat else None
    return min(drain_s, max(LEAST_DRAIN_S, 3 * saved.save_s)) if saved else drain_s


def drain_lead_s(attempt: Attempt, caps: Caps, *, tick_s: float, drain_s: float) -> float:
    """Seconds before the cap at which a drain must start: billing tick, drain, teardown, list lag and a quantum."""
    return _lead_s(attempt.line.offer, caps, tick_s, capped_drain_s(attempt, drain_s))


def _lead_s(offer: Offer, caps: Caps, tick_s: float, drain_s: float) -> float:
    return tick_s + drain_s + caps.teardown_s + 2 * caps.list_lag_s + offer.billing_quantum_s


def least_usd(offer: Offer, caps: Caps, *, nodes: int = 1, tick_s: float, drain_s: float) -> Decimal:
    """A new attempt needs more than this under its cap: with less it would have to drain as soon as it is bought, or
    would pass its cap by what the cloud bills at the least."""
    least_s = max(_lead_s(offer, caps, tick_s, drain_s), offer.billing_minimum_s)
    return _cost(offer, nodes, timedelta(seconds=least_s))


def cap_is_near(attempt: Attempt, job: Job, caps: Caps, now: datetime, *, tick_s: float, drain_s: float) -> bool:
    """True when the job must drain now: spent + rate x (tick + drain + teardown) reaches the cap.

    Then spend <= cap holds while the cloud ends billing within `caps.teardown_s` of destroy. Where it takes t seconds
    longer, the overshoot is at most rate x t.
    """
    lead = timedelta(seconds=drain_lead_s(attempt, caps, tick_s=tick_s, drain_s=drain_s))
    others = job.spent_usd - attempt.charged_usd
    # What was charged before it was known to run later than the create is spent, and worked off.
    return others + max(attempt.charged_usd, accrued(attempt, now + lead)) >= job.cap_usd


def reservation(job: Job) -> Decimal:
    """What an attempt reserves: all that is left under the job's cap."""
    return max(ZERO, job.cap_usd - job.spent_usd)
