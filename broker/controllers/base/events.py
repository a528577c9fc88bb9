"""Events as the controllers write them."""

from typing import Any

from broker.domain.job import Attempt, AttemptState, Event, Job
from broker.lifecycle.transitions import kept_until
from broker.reporting import agent_messages as told


def event(
    job: Job, kind: str, message: str, *, attempt: Attempt | None = None, data: dict[str, Any] | None = None
) -> Event:
    """An event of a job; the store gives it its number and time."""
    return Event(job_id=job.id, attempt_id=attempt.id if attempt else None, kind=kind, message=message, data=data or {})


def is_told(times: int, first: int) -> bool:
    """Of what happens again and again: at the first so many, and then each time that there are twice as many."""
    doubled, rest = divmod(times, first)
    return rest == 0 and doubled & (doubled - 1) == 0


def news(job: Job, before: Attempt, after: Attempt) -> tuple[Event, ...]:
    """What the machine has to tell of its training since the last look."""
    return tuple(
        event(job, f"training.{one.kind}", f"attempt {after.number}: {one.message}", attempt=after)
        for one in told.new_agent_messages(before, after)
    )


def kept(job: Job, attempt: Attempt) -> tuple[Event, ...]:
    """Told when a machine is left standing: until when, how to look at it, and how to end it."""
    until = kept_until(attempt, job)
    if until is None:
        return ()
    message = (
        f"the machine of attempt {attempt.number} is kept, and bills, until {until:%Y-%m-%d %H:%M:%S} UTC: look at it "
        f"with `gpubroker ssh {job.id}`, end it with `gpubroker cancel {job.id}`"
    )
    return (event(job, "attempt.machine_kept", message, attempt=attempt, data={"until": until.isoformat()}),)


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
