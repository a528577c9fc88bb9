"""Events as the controllers write them."""

from typing import Any

from broker.domain.job import Attempt, AttemptState, Event, Job


def event(
    job: Job, kind: str, message: str, *, attempt: Attempt | None = None, data: dict[str, Any] | None = None
) -> Event:
    """An event of a job; the store gives it its number and time."""
    return Event(job_id=job.id, attempt_id=attempt.id if attempt else None, kind=kind, message=message, data=data or {})


def moved(job: Job, attempt: Attempt) -> Event:
    """What became of an attempt: it is up, or why it is not any more."""
    offer = attempt.line.offer
    where = f"attempt {attempt.number} at {offer.cloud} {offer.region}"
    if attempt.state is AttemptState.TRAINING:
        resumed = attempt.beat.resumed_from if attempt.beat else None
        message = f"{where} is up" + (f", resuming from step {resumed}" if resumed else "")
        return event(job, "attempt.training", message, attempt=attempt)
    reason = attempt.reason.value if attempt.reason else "ended"
    at = f" at step {attempt.beat.step}" if attempt.beat and attempt.beat.step else ""
    detail = f" ({attempt.detail})" if attempt.detail else ""
    return event(job, f"attempt.{reason}", f"{where}: {reason}{at}{detail}", attempt=attempt)
