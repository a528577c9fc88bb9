"""What an attempt costs, and when its job must drain so that the cap holds."""

from datetime import datetime, timedelta
from decimal import Decimal

from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job
from broker.domain.money import ZERO, usd

HOUR = Decimal(3600)


def accrued(attempt: Attempt, until: datetime) -> Decimal:
    """Dollars from `create_sent_at` to `until`, in the provider's quantum rounded up; in every state alike."""
    if attempt.create_sent_at is None or until <= attempt.create_sent_at:
        return ZERO
    quantum = timedelta(seconds=attempt.line.offer.billing_quantum_s)
    whole, rest = divmod(until - attempt.create_sent_at, quantum)
    seconds = (whole + bool(rest)) * attempt.line.offer.billing_quantum_s
    return usd(attempt.line.offer.usd_per_hour * seconds / HOUR)


def owed(attempt: Attempt, until: datetime) -> Decimal:
    """What is still to be charged up to `until`; never negative, also when a clock went backwards."""
    return max(ZERO, accrued(attempt, until) - attempt.charged_usd)


def drain_lead_s(attempt: Attempt, caps: Caps, *, tick_s: float, drain_s: float) -> float:
    """Seconds before the cap at which a drain must start: one billing tick, the drain itself, the teardown, a quantum.

    The drain is measured when there is a checkpoint to measure by (three times its save time), else `drain_s`.
    """
    saved = attempt.beat.checkpoint if attempt.beat else None
    drain = min(drain_s, max(10.0, 3 * saved.save_s)) if saved else drain_s
    return tick_s + drain + caps.teardown_s + 2 * caps.list_lag_s + attempt.line.offer.billing_quantum_s


def cap_is_near(attempt: Attempt, job: Job, caps: Caps, now: datetime, *, tick_s: float, drain_s: float) -> bool:
    """True when the job must drain now: spent + rate x (tick + drain + teardown) reaches the cap.

    Then spend <= cap holds while the cloud ends billing within `caps.teardown_s` of destroy. Where it takes t seconds
    longer, the overshoot is at most rate x t.
    """
    lead = timedelta(seconds=drain_lead_s(attempt, caps, tick_s=tick_s, drain_s=drain_s))
    others = job.spent_usd - attempt.charged_usd
    return others + accrued(attempt, now + lead) >= job.cap_usd


def reservation(job: Job) -> Decimal:
    """What an attempt reserves: all that is left under the job's cap."""
    return max(ZERO, job.cap_usd - job.spent_usd)
