"""Maps signals of attempts to events and end reasons, and decides when a signal is due."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from broker.billing.caps import cap_is_near
from broker.billing.drain import DrainBudget, capped_drain_s
from broker.billing.time_limits import time_is_up
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job, Reason, Signal
from broker.lifecycle.state_machine import AttemptEvent


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Event and end reason of a signal."""

    event: AttemptEvent
    reason: Reason


SIGNALS: Mapping[Signal, Meaning] = {
    Signal.CAP: Meaning(event=AttemptEvent.CAP, reason=Reason.CAPPED),
    Signal.OUT_OF_TIME: Meaning(event=AttemptEvent.OUT_OF_TIME, reason=Reason.OUT_OF_TIME),
    Signal.IDLE: Meaning(event=AttemptEvent.IDLE, reason=Reason.IDLE),
    Signal.IDLE_NOW: Meaning(event=AttemptEvent.IDLE_NOW, reason=Reason.IDLE),
    Signal.HUNG: Meaning(event=AttemptEvent.HUNG, reason=Reason.HUNG),
    Signal.BUDGET: Meaning(event=AttemptEvent.BUDGET, reason=Reason.BUDGET),
}


def signalled(attempt: Attempt, job: Job) -> AttemptEvent | None:
    """Return why a live attempt must end, a user's stop first; None: it may continue."""
    if job.stop_requested:
        return AttemptEvent.STOP
    return SIGNALS[attempt.signal].event if attempt.signal is not None else None


def due_signal(attempt: Attempt, job: Job, caps: Caps, now: datetime, tempo: DrainBudget) -> Signal | None:
    """Return the signal for a live attempt whose money or time is used up; None: it may continue, or has a signal."""
    if attempt.signal is not None:
        return None
    if cap_is_near(attempt, job, caps, now, tempo):
        return Signal.CAP
    return Signal.OUT_OF_TIME if time_is_up(attempt, job, caps, now, tempo) else None


def grace_over(
    attempt: Attempt, job: Job, caps: Caps, now: datetime, tempo: DrainBudget, *, look_s: float, heard_s: float
) -> bool:
    """Return True when a drain is not waited for any longer.

    The drain's time is over, or another `look_s` seconds would exceed the cap or the job's time. The second rule holds
    for every drain, because one for a stop or a budget was started without a lead for the cap.

    `heard_s`: longest time until the agent has received the order and starts its own count. A drain for money or time
    does not get it in addition.
    """
    told_by_cap = attempt.reason in (Reason.CAPPED, Reason.OUT_OF_TIME)
    most_s = capped_drain_s(attempt, tempo.drain_s) if told_by_cap else tempo.drain_s + heard_s
    if (now - (attempt.draining_since or now)).total_seconds() > most_s:
        return True
    later, after = now + timedelta(seconds=look_s), replace(tempo, detect_s=0, drain_s=0)
    return any(over(attempt, job, caps, later, after) for over in (cap_is_near, time_is_up))
