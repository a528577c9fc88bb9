"""The time of a job: its deadline and its max_duration."""

from dataclasses import replace
from datetime import UTC, datetime

from broker.billing.accrual import SECOND, machine_s
from broker.billing.drain import DrainBudget, drain_lead_s
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job


def time_left_s(job: Job, now: datetime) -> float | None:
    """Seconds for which new machines of the job may stand; None: as long as the money lasts."""
    left = []
    if job.spec.deadline is not None:
        left.append((job.spec.deadline - now).total_seconds())
    if job.spec.max_duration is not None:
        left.append(job.spec.max_duration - job.machine_s)
    return min(left, default=None)


def time_is_up(attempt: Attempt, job: Job, caps: Caps, now: datetime, drain_budget: DrainBudget) -> bool:
    """True when the job must drain now to be over at its deadline, and before its `max_duration` is used up."""
    if job.spec.deadline is None and job.spec.max_duration is None:
        return False
    lead_s = drain_lead_s(attempt, caps, drain_budget)
    running = replace(job, machine_s=job.machine_s + machine_s(attempt, now))
    left_s = time_left_s(running, now)
    return left_s is not None and left_s <= lead_s


def out_of_time(job: Job, now: datetime, *, needed_s: float = 0.0) -> str | None:
    """Why nothing can be bought any more for want of time, in one line; None: there is enough.

    `needed_s`: less than this is no time: a machine would be drained as soon as it is bought.
    """
    left_s = time_left_s(job, now)
    if left_s is None or left_s > needed_s:
        return None
    return out_of_time_message(job, now)


def out_of_time_message(job: Job, now: datetime) -> str:
    """Which of its limits of time a job has reached, and how it goes on, in one line."""
    deadline, most = job.spec.deadline, job.spec.max_duration
    what = f"its max_duration of {most} s"
    if deadline is not None and (most is None or deadline - now <= (most - job.machine_s) * SECOND):
        what = f"its deadline {deadline.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"out of time: {what} is reached; its checkpoint is kept, `gpubroker retry {job.id}` goes on from it"
