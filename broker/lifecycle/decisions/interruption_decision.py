"""Decides how an attempt with a signal, a stop or a preemption notice is drained and ended.

Used by the interruption controller. Rules of a drain's duration: `broker.lifecycle.signals.is_drain_over`.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from broker.billing.drain import DrainBudget
from broker.billing.time_limits import out_of_time_message
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job
from broker.lifecycle.liveness import AttemptObservation, LivenessTimeouts, judge
from broker.lifecycle.signals import is_drain_over, required_end
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import reason_of, step


@dataclass(frozen=True, kw_only=True)
class DrainFacts:
    """All facts on which the decision about one draining attempt depends."""

    job: Job
    before: Attempt
    """The attempt as it was claimed."""
    attempt: Attempt
    """The attempt with its latest heartbeat, final report and traffic."""
    observation: AttemptObservation
    caps: Caps
    now: datetime
    timeouts: LivenessTimeouts
    drain_budget: DrainBudget
    poll_s: float
    """Seconds until a draining attempt is observed again."""
    order_s: float
    """Longest time until the agent has received the order to drain."""


@dataclass(frozen=True, kw_only=True)
class InterruptionDecision:
    """The next state of an attempt that is interrupted."""

    before: Attempt
    attempt: Attempt
    """The attempt after the decision."""
    event: AttemptEvent | None
    """Event that starts or ends the drain, or ends the attempt; None: the drain continues."""
    due_in_s: float = 0.0
    """Seconds until the attempt is claimed again; 0: at once."""


def interrupt(attempt: Attempt, job: Job, now: datetime) -> InterruptionDecision:
    """Start to drain, or end, an attempt because of a stop or a signal."""
    event = required_end(attempt, job)
    assert event is not None
    interrupted = step(attempt, event, now).attempt
    return InterruptionDecision(
        before=attempt, attempt=replace(interrupted, detail=_detail(event, job, now)), event=event
    )


def _detail(event: AttemptEvent, job: Job, now: datetime) -> str:
    """Return why an attempt is interrupted. The review writes the target and the saving of a move to `job.reason`."""
    if event is AttemptEvent.OUT_OF_TIME:
        return out_of_time_message(job, now)
    return (job.reason or event.value) if event is AttemptEvent.MOVE else event.value


def decide_drain(facts: DrainFacts) -> InterruptionDecision:
    """End a drain with the final report, with the end of the machine, or when its time is over."""
    attempt, observation, now = facts.attempt, facts.observation, facts.now
    event = judge(attempt, observation, now, facts.timeouts, float("inf"))
    if event not in (AttemptEvent.FINAL, AttemptEvent.GONE):
        is_over = is_drain_over(
            attempt, facts.job, facts.caps, now, facts.drain_budget, poll_s=facts.poll_s, order_s=facts.order_s
        )
        event = AttemptEvent.GRACE_OVER if is_over else None
    if event is None:
        return InterruptionDecision(before=facts.before, attempt=attempt, event=None, due_in_s=facts.poll_s)
    reason = reason_of(observation.final, attempt.reason) if observation.final else None
    return InterruptionDecision(
        before=facts.before, attempt=step(attempt, event, now, reason=reason).attempt, event=event
    )
