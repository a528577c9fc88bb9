"""Events as the controllers write them."""

from typing import Any

from broker.domain.job import Attempt, Event, Job


def event(
    job: Job, kind: str, message: str, *, attempt: Attempt | None = None, data: dict[str, Any] | None = None
) -> Event:
    """An event of a job; the store gives it its number and time."""
    return Event(job_id=job.id, attempt_id=attempt.id if attempt else None, kind=kind, message=message, data=data or {})
