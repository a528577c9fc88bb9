"""Wrong rules for the ends of attempts. Each replaces one rule of the product; see `mutants.py`."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from broker.domain.job import Attempt, AttemptState, Job, Reason
from broker.lifecycle.liveness import LivenessTimeouts
from broker.lifecycle.observation.attempt_facts import ObservedFacts
from broker.lifecycle.state_machine import ATTEMPT_RULES, AttemptEvent, Effect, Rule
from broker.lifecycle.transitions import after_attempt, inspection_end

_KEPT_UNTIL, _AFTER = inspection_end, after_attempt
no_drain = {
    **ATTEMPT_RULES,
    (AttemptState.TRAINING, AttemptEvent.MOVE): Rule(
        next=AttemptState.TERMINATING, effects=(Effect.DESTROY,), reason=Reason.MOVED
    ),
}
"""Rules that destroy the machine of a moving attempt at once, without a drain."""


def count_retries_twice(*given: Any, **options: Any) -> Job:
    """Count each retry twice."""
    before, after = given[0], _AFTER(*given, **options)
    return replace(after, retries_used=2 * after.retries_used - before.retries_used)


def count_preemptions(*given: Any, **options: Any) -> Job:
    """Count a preemption as a retry."""
    after = _AFTER(*given, **options)
    return replace(after, retries_used=after.retries_used + (given[2] is Reason.PREEMPTED))


def kept_for_a_day(attempt: Attempt, job: Job) -> datetime | None:
    """Keep the machine for a day, longer than the user asked for."""
    until = _KEPT_UNTIL(attempt, job)
    return None if until is None else until + timedelta(days=1)


def requires_final_heartbeat(facts: ObservedFacts, timeouts: LivenessTimeouts) -> bool:
    """Require the heartbeat that reports the end, although it may have been lost."""
    return facts.heartbeat is not None and facts.heartbeat.done
