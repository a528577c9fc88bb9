"""Decides what an observation means for a booting or training attempt. Used by the liveness controller.

`judge` of `broker.lifecycle.liveness` names the event; this module returns the next state and what is reported.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from broker.domain.job import Attempt, AttemptState, Job, Reason
from broker.lifecycle.liveness import (
    AttemptObservation,
    LivenessTimeouts,
    fault_message,
    judge,
    mismatch_message,
)
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import reason_of, setup_reason, step

SILENT = "it sends no heartbeat"
"""First words of `Attempt.detail` while neither the agent nor its cloud answers."""


@dataclass(frozen=True, kw_only=True)
class LivenessFacts:
    """All facts on which the decision about one booting or training attempt depends."""

    job: Job
    before: Attempt
    """The attempt as it was claimed."""
    attempt: Attempt
    """The attempt with its latest heartbeat, final report and traffic."""
    observation: AttemptObservation | None
    """None: the listings show an end, and the blob store, which holds its reason, cannot be read."""
    now: datetime
    timeouts: LivenessTimeouts
    boot_deadline_s: float
    drained_for: Reason | None = None
    """Reason of a drain, also if a restored backup lacks it; None: the attempt was not drained."""
    unlisted: str | None = None
    """Error of the cloud's latest listing; None: the cloud was listed."""
    poll_s: float = 2.0
    """Seconds until an attempt with nothing new is observed again."""
    look_s: float = 2.0
    """Seconds between two polls of a live attempt."""


class LivenessReport(StrEnum):
    """Events that report a decision, in addition to new messages of the agent."""

    NONE = "none"
    SILENT = "silent"
    """Neither the agent nor its cloud answers; the attempt is charged."""
    TRANSITION = "transition"
    """The attempt started to train, or ended."""


@dataclass(frozen=True, kw_only=True)
class LivenessDecision:
    """The next state of an attempt, and what is reported."""

    before: Attempt
    attempt: Attempt
    """The attempt after the decision."""
    report: LivenessReport = LivenessReport.NONE
    due_in_s: float = 0.0
    """Seconds until the attempt is claimed again; 0: at once."""


def decide_liveness(facts: LivenessFacts) -> LivenessDecision:
    """Return the decision on an observed attempt."""
    observation = facts.observation
    if observation is None:
        return LivenessDecision(before=facts.before, attempt=facts.before, due_in_s=facts.look_s)
    event = judge(facts.attempt, observation, facts.now, facts.timeouts, facts.boot_deadline_s)
    if event is None:
        return _continue(facts, observation)
    return _move(facts, observation, event)


def _continue(facts: LivenessFacts, observation: AttemptObservation) -> LivenessDecision:
    """Report once that neither the agent nor its cloud answers. The machine may exist, so the attempt stays charged."""
    attempt, report = facts.attempt, LivenessReport.NONE
    is_silent = observation.store_ok and (observation.beat_age_s or 0.0) >= facts.timeouts.silence_s
    is_reported = facts.before.detail.startswith(SILENT)
    if not is_silent or facts.unlisted is None:
        attempt = replace(attempt, detail="") if is_reported else attempt
    elif not is_reported:
        detail = f"{SILENT}, and {attempt.line.offer.provider} cannot be listed: {facts.unlisted}"
        attempt, report = replace(attempt, detail=detail), LivenessReport.SILENT
    return LivenessDecision(before=facts.before, attempt=attempt, report=report, due_in_s=facts.poll_s)


def _move(facts: LivenessFacts, observation: AttemptObservation, event: AttemptEvent) -> LivenessDecision:
    reason = reason_of(observation.final, facts.drained_for) if observation.final else None
    if event is AttemptEvent.SETUP_FAILED:
        reason = setup_reason(observation.listed)
    attempt = step(facts.attempt, event, facts.now, reason=reason).attempt
    if event is not AttemptEvent.FIRST_BEAT:
        attempt = replace(attempt, detail=_end_message(facts, observation, event))
    if not attempt.handles:
        attempt = replace(attempt, handles=tuple(machine.handle for machine in observation.listed))
    due_in_s = facts.look_s if attempt.state is AttemptState.TRAINING else 0.0
    return LivenessDecision(before=facts.before, attempt=attempt, report=LivenessReport.TRANSITION, due_in_s=due_in_s)


def _end_message(facts: LivenessFacts, observation: AttemptObservation, event: AttemptEvent) -> str:
    """Return why an attempt ends, in one line."""
    if event is AttemptEvent.MISMATCH:
        return mismatch_message(facts.attempt.line.offer, observation.listed) or ""
    if event is AttemptEvent.SETUP_FAILED:
        return fault_message(observation.listed) or event.value
    return observation.final.message if observation.final else event.value
