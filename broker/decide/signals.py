"""What a signal of an attempt means: the event that it amounts to, and what the attempt then ended for."""

from collections.abc import Mapping
from dataclasses import dataclass

from broker.decide.lifecycle import AttemptEvent
from broker.domain.job import Attempt, Job, Reason, Signal


@dataclass(frozen=True, kw_only=True)
class Meaning:
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
    """Why a live attempt is to end, people first; None: it may go on."""
    if job.stop_requested:
        return AttemptEvent.STOP
    return SIGNALS[attempt.signal].event if attempt.signal is not None else None
