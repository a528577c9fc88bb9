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
class SignalMeaning:
    """Event and end reason of a signal."""

    event: AttemptEvent
    reason: Reason


SIGNALS: Mapping[Signal, SignalMeaning] = {
    Signal.CAP: SignalMeaning(event=AttemptEvent.CAP, reason=Reason.CAPPED),
    Signal.OUT_OF_TIME: SignalMeaning(event=AttemptEvent.OUT_OF_TIME, reason=Reason.OUT_OF_TIME),
    Signal.IDLE: SignalMeaning(event=AttemptEvent.IDLE, reason=Reason.IDLE),
    Signal.IDLE_NOW: SignalMeaning(event=AttemptEvent.IDLE_NOW, reason=Reason.IDLE),
    Signal.HUNG: SignalMeaning(event=AttemptEvent.HUNG, reason=Reason.HUNG),
    Signal.BUDGET: SignalMeaning(event=AttemptEvent.BUDGET, reason=Reason.BUDGET),
    Signal.MOVE: SignalMeaning(event=AttemptEvent.MOVE, reason=Reason.MOVED),
}


def required_end(attempt: Attempt, job: Job) -> AttemptEvent | None:
    """Return why a live attempt must end, a user's stop first; None: it may continue."""
    if job.stop_requested:
        return AttemptEvent.STOP
    return SIGNALS[attempt.signal].event if attempt.signal is not None else None


def due_signal(attempt: Attempt, job: Job, caps: Caps, now: datetime, drain_budget: DrainBudget) -> Signal | None:
    """Return the signal for a live attempt whose money or time is used up; None: it may continue, or has a signal."""
    if attempt.signal is not None:
        return None
    if cap_is_near(attempt, job, caps, now, drain_budget):
        return Signal.CAP
    return Signal.OUT_OF_TIME if time_is_up(attempt, job, caps, now, drain_budget) else None


def is_drain_over(
    attempt: Attempt, job: Job, caps: Caps, now: datetime, drain_budget: DrainBudget, *, poll_s: float, order_s: float
) -> bool:
    """Return True when a drain must end now.

    Its time is over, or another `poll_s` seconds would exceed the cap or the job's time. The second rule holds for
    every drain, because a drain for a stop or a budget may begin close to the cap.

    `order_s`: longest time until the agent has received the order to drain. It extends every drain except those for the
    cap or the job's time.
    """
    for_limit = attempt.reason in (Reason.CAPPED, Reason.OUT_OF_TIME)
    limit_s = capped_drain_s(attempt, drain_budget.drain_s) if for_limit else drain_budget.drain_s + order_s
    if (now - (attempt.draining_since or now)).total_seconds() > limit_s:
        return True
    later, after = now + timedelta(seconds=poll_s), replace(drain_budget, detect_s=0, drain_s=0)
    return any(is_reached(attempt, job, caps, later, after) for is_reached in (cap_is_near, time_is_up))
