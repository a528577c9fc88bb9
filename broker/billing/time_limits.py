"""Time limits of a job: its deadline and its max_duration."""

from dataclasses import replace
from datetime import UTC, datetime

from broker.billing.accrual import SECOND, machine_s
from broker.billing.drain import DrainBudget, drain_lead_s
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job


def time_left_s(job: Job, now: datetime) -> float | None:
    """Return seconds for which new machines of the job may exist; None: no limit."""
    left = []
    if job.spec.deadline is not None:
        left.append((job.spec.deadline - now).total_seconds())
    if job.spec.max_duration is not None:
        left.append(job.spec.max_duration - job.machine_s)
    return min(left, default=None)


def time_is_up(attempt: Attempt, job: Job, caps: Caps, now: datetime, drain_budget: DrainBudget) -> bool:
    """Return True if the job must drain now to end by its deadline and within its `max_duration`."""
    if job.spec.deadline is None and job.spec.max_duration is None:
        return False
    lead_s = drain_lead_s(attempt, caps, drain_budget)
    running = replace(job, machine_s=job.machine_s + machine_s(attempt, now))
    left_s = time_left_s(running, now)
    return left_s is not None and left_s <= lead_s


def out_of_time(job: Job, now: datetime, *, needed_s: float = 0.0) -> str | None:
    """Return why no time is left to buy a machine, in one line; None: there is enough.

    `needed_s`: a machine with less time would drain as soon as it is bought.
    """
    left_s = time_left_s(job, now)
    if left_s is None or left_s > needed_s:
        return None
    return out_of_time_message(job, now)


def out_of_time_message(job: Job, now: datetime) -> str:
    """Return the time limit that a job has reached, and how to resume it, in one line."""
    deadline, max_duration = job.spec.deadline, job.spec.max_duration
    limit = f"its max_duration of {max_duration} s"
    if deadline is not None and (max_duration is None or deadline - now <= (max_duration - job.machine_s) * SECOND):
        limit = f"its deadline {deadline.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"out of time: {limit} is reached; its checkpoint is kept, `gpubroker retry {job.id}` resumes from it"
