"""Texts of the events that controllers write."""

from typing import Any

from broker.domain.job import Attempt, AttemptState, Event, Job
from broker.lifecycle.decisions.interruption_decision import InterruptionDecision
from broker.lifecycle.decisions.launch_decision import LaunchDecision, LaunchReport
from broker.lifecycle.decisions.liveness_decision import LivenessDecision, LivenessReport
from broker.lifecycle.transitions import inspection_end
from broker.reporting import progress


def event(
    job: Job, kind: str, message: str, *, attempt: Attempt | None = None, data: dict[str, Any] | None = None
) -> Event:
    """Return an event of a job. The store assigns its number and time."""
    return Event(job_id=job.id, attempt_id=attempt.id if attempt else None, kind=kind, message=message, data=data or {})


def agent_events(job: Job, before: Attempt, after: Attempt) -> tuple[Event, ...]:
    """Return the messages of the agent that are new since the previous poll."""
    return tuple(
        event(job, f"training.{note.kind}", f"attempt {after.number}: {note.message}", attempt=after)
        for note in progress.new_agent_messages(before, after)
    )


def inspection_events(job: Job, attempt: Attempt) -> tuple[Event, ...]:
    """Return the event of a machine that is kept after a failure: until when, how to open it, and how to end it."""
    until = inspection_end(attempt, job)
    if until is None:
        return ()
    message = (
        f"the machine of attempt {attempt.number} is kept, and bills, until {until:%Y-%m-%d %H:%M:%S} UTC: look at it "
        f"with `gpubroker ssh {job.id}`, end it with `gpubroker cancel {job.id}`"
    )
    return (event(job, "attempt.machine_kept", message, attempt=attempt, data={"until": until.isoformat()}),)


def transition_event(job: Job, attempt: Attempt) -> Event:
    """Return the event of an attempt that started training, or that ended, with the reason."""
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


def launch_events(job: Job, decision: LaunchDecision) -> tuple[Event, ...]:
    """Return the events that report a decision."""
    attempt = decision.attempt
    match decision.report:
        case LaunchReport.REFUSED:
            return (event(job, "attempt.refused", decision.message, attempt=attempt),)
        case LaunchReport.BOOTING:
            return (event(job, "attempt.booting", f"attempt {attempt.number} is starting", attempt=attempt),)
        case LaunchReport.ENDED:
            return (transition_event(job, attempt),)
    return ()


def liveness_events(job: Job, decision: LivenessDecision) -> tuple[Event, ...]:
    """Return the events that report a decision, the agent's messages first."""
    attempt = decision.attempt
    messages = agent_events(job, decision.before, attempt)
    match decision.report:
        case LivenessReport.SILENT:
            message = f"attempt {attempt.number}: {attempt.detail}; it is charged"
            return (*messages, event(job, "attempt.silent", message, attempt=attempt))
        case LivenessReport.TRANSITION:
            return (*messages, transition_event(job, attempt), *inspection_events(job, attempt))
    return messages


def interruption_event(job: Job, decision: InterruptionDecision) -> Event:
    """Return the event of an attempt that starts to drain, or ends without a drain."""
    attempt = decision.attempt
    message = f"attempt {attempt.number} is {attempt.state.value}: {attempt.detail}"
    return event(job, f"attempt.{attempt.state.value}", message, attempt=attempt)


def drain_events(job: Job, decision: InterruptionDecision) -> tuple[Event, ...]:
    """Return the agent's messages, and at the end of a drain the event of a machine that is kept."""
    messages = agent_events(job, decision.before, decision.attempt)
    return messages if decision.event is None else (*messages, *inspection_events(job, decision.attempt))
