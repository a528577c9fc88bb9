"""Decides what the spend guard reports about a training attempt: its forecast and its idleness.

Used by the spend guard, which gathers `GuardFacts`, keeps the two windows, and writes what is new as a note.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker.billing.caps import min_budget_usd
from broker.billing.drain import DrainBudget
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Event, Forecast, Job, Signal
from broker.domain.policy import Policy
from broker.domain.spec import IdleAction, IdleKind, IdlePolicy, idle_policy
from broker.estimator.preemption_rate import History
from broker.lifecycle import idle
from broker.lifecycle.idle import Idle, IdleWatch, idle_signal, judge_idle
from broker.quote import forecast
from broker.quote.forecast import (
    StepRateWindow,
    late_message,
    measured_attempt,
    overrun_message,
    quoted_usd,
    requote_message,
    sufficient_cap_usd,
)
from trainer.contract.documents import Heartbeat

_CONSEQUENCES: dict[IdleAction, str] = {
    "notify": "it bills on; end it with `gpubroker cancel {job}`",
    "drain": "checkpoint and end",
    "end": "it is ended",
}


@dataclass(frozen=True, kw_only=True)
class GuardFacts:
    """All facts on which the guard's decision about one training attempt depends."""

    job: Job
    attempt: Attempt
    beat: Heartbeat
    """The attempt's latest heartbeat."""
    caps: Caps
    drain_budget: DrainBudget
    policies: Sequence[Policy] = ()
    """Policies that cover the job's owner."""
    spots: History
    """Preemptions of this installation's own spot machines."""
    now: datetime
    at_s: float
    """Monotonic time of the watcher, in seconds."""
    step_rate: StepRateWindow | None = None
    """Steps that this process measured so far; None: none yet."""
    idle_watch: IdleWatch | None = None
    """Idleness that this process watched so far; None: none yet."""


@dataclass(frozen=True, kw_only=True)
class GuardDecision:
    """The updated windows, and what is reported."""

    step_rate: StepRateWindow | None
    idle_watch: IdleWatch
    is_new: bool
    """True if the forecast or the idleness differs from what the store has."""
    forecast: Forecast | None
    """The forecast to store."""
    idle: IdleKind | None
    """The idleness to store; None: the attempt is not idle."""
    signal: Signal | None
    """Signal that ends an idle attempt; None: it may continue."""
    events: tuple[Event, ...]


def decide_guard(facts: GuardFacts) -> GuardDecision:
    """Return the forecast and the idleness of an attempt, each reported once when it begins."""
    attempt, job = facts.attempt, facts.job
    policy = applied_idle_policy(job, facts.policies)
    step_rate = forecast.next_window(facts.step_rate, attempt, facts.at_s)
    step_s = step_rate.step_s if step_rate else None
    expected = forecast.forecast(attempt, job, facts.caps, step_s, facts.now, facts.spots) or job.forecast
    idle_watch = idle.next_watch(facts.idle_watch, facts.beat, facts.at_s, policy)
    idle_state = judge_idle(idle_watch, policy)
    kind = idle_state.kind if idle_state else None
    new_idle = idle_state if kind != attempt.idle else None
    return GuardDecision(
        step_rate=step_rate,
        idle_watch=idle_watch,
        is_new=forecast.differs(expected, job.forecast) or kind != attempt.idle,
        forecast=expected,
        idle=kind,
        signal=idle_signal(new_idle) if new_idle else None,
        events=(
            *_requote_events(facts, expected),
            *_overrun_events(facts, expected),
            *_late_events(facts, expected),
            *_idle_events(facts, new_idle),
        ),
    )


def applied_idle_policy(job: Job, policies: Sequence[Policy]) -> IdlePolicy:
    """Return the job's own idle policy, or that of the narrowest policy: a user's, a team's, the installation's."""
    idle_policies = [policy for policy in policies if policy.idle is not None]
    narrowest = max(idle_policies, key=lambda policy: (policy.user is not None, policy.team is not None), default=None)
    return idle_policy(job.spec.idle, narrowest.idle if narrowest else None)


def _requote_events(facts: GuardFacts, expected: Forecast | None) -> tuple[Event, ...]:
    """Return the event of the forecast that the attempt's first steps have just measured."""
    attempt, job = facts.attempt, facts.job
    interval = expected.interval if expected else None
    if expected is None or interval is None or measured_attempt(job.forecast) == interval.attempt:
        return ()
    quoted = quoted_usd(attempt, job)
    data = {
        "usd": str(expected.usd),
        "usd_low": str(interval.usd_low),
        "usd_high": str(interval.usd_high),
        "finish_at": expected.finish_at.isoformat(),
        "finish_earliest": interval.finish_earliest.isoformat(),
        "finish_latest": interval.finish_latest.isoformat(),
        "step_s": f"{expected.step_s:.6g}",
    } | ({} if quoted is None else {"quoted_usd": str(quoted)})
    return (_event(facts, "job.requoted", requote_message(expected, interval, attempt, job), data),)


def _overrun_events(facts: GuardFacts, expected: Forecast | None) -> tuple[Event, ...]:
    """Return the event of a forecast that has just passed the cap."""
    job, previous = facts.job, facts.job.forecast
    if expected is None or not expected.over_cap or (previous is not None and previous.over_cap):
        return ()
    every_s = job.spec.checkpoint.min_interval_s
    drain_usd = min_budget_usd(facts.attempt.line, facts.caps, every_s, facts.drain_budget)
    data = {
        "usd": str(expected.usd),
        "over_usd": str(expected.usd - job.cap_usd),
        "cap_usd": str(job.cap_usd),
        "would_do_usd": str(sufficient_cap_usd(expected, job, drain_usd)),
        "finish_at": expected.finish_at.isoformat(),
    }
    message = overrun_message(expected, job, drain_usd)
    return (_event(facts, "job.overrun_forecast", message, data),)


def _late_events(facts: GuardFacts, expected: Forecast | None) -> tuple[Event, ...]:
    """Return the event of a forecast that has just passed the deadline or `max_duration`."""
    job, previous = facts.job, facts.job.forecast
    if expected is None or not expected.late or (previous is not None and previous.late):
        return ()
    message = late_message(expected, facts.attempt, job, facts.now)
    return (_event(facts, "job.late_forecast", message, {"finish_at": expected.finish_at.isoformat()}),)


def _idle_events(facts: GuardFacts, idle_state: Idle | None) -> tuple[Event, ...]:
    if idle_state is None:
        return ()
    consequence = _CONSEQUENCES[idle_state.action].format(job=facts.job.id)
    data = {"kind": idle_state.kind, "action": idle_state.action}
    return (_event(facts, "job.idle", f"{idle_state.message}; {consequence}", data),)


def _event(facts: GuardFacts, kind: str, message: str, data: Mapping[str, str]) -> Event:
    return Event(job_id=facts.job.id, attempt_id=facts.attempt.id, kind=kind, message=message, data={**data})
