"""Reports of the spend guard about a training attempt, from facts."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.job import Attempt, Job, Signal
from broker.domain.policy import Policy
from broker.domain.spec import IdlePolicy
from broker.quote.forecast import StepRateWindow
from broker.quote.guard_decision import GuardDecision, GuardFacts, applied_idle_policy, decide_guard
from tests.support import build
from trainer.contract.documents import Heartbeat

MEASURED = StepRateWindow(boot="b", since_s=0.0, since_step=1, at_s=100.0, step=11)
"""Ten seconds a step."""


def beat(step: int = 12, **changes: Any) -> Heartbeat:
    values = {"attempt": "a", "boot": "b", "seq": 1, "phase": "training", "step": step, "total_steps": 1000}
    return Heartbeat(**{**values, **changes})


def facts(job: Job | None = None, **changes: Any) -> GuardFacts:
    values: dict[str, Any] = {
        "job": job or build.active_job(cap_usd=Decimal(1000)), "attempt": build.attempt(beat=beat()), "beat": beat(),
        "caps": Caps(spot=True), "drain_budget": build.drain_budget(), "spots": {}, "now": build.at(200),
        "at_s": 110.0, "step_rate": MEASURED,
    }  # fmt: skip
    return GuardFacts(**values | changes)


def kinds(decision: GuardDecision) -> list[str]:
    return [event.kind for event in decision.events]


def stored(known: GuardFacts, decision: GuardDecision) -> GuardFacts:
    """Return the facts of a later look of any broker, once the note is written."""
    attempt: Attempt = replace(known.attempt, idle=decision.idle, signal=decision.signal)
    job = replace(known.job, forecast=decision.forecast)
    watched = {"step_rate": decision.step_rate, "idle_watch": decision.idle_watch}
    return replace(known, attempt=attempt, job=job, **watched)  # type: ignore[arg-type]


@given(
    cap_cents=st.integers(1, 10_000),
    max_duration=st.none() | st.integers(60, 100_000),
    step=st.integers(2, 999),
    at_s=st.floats(110, 5000),
    utilisation=st.none() | st.sampled_from([0.0, 1.0]),
)
def test_a_stored_forecast_is_not_reported_again(
    cap_cents: int, max_duration: int | None, step: int, at_s: float, utilisation: float | None
) -> None:
    spec = build.spec() if max_duration is None else build.spec(max_duration=max_duration)
    job = build.active_job(spec=spec, cap_usd=Decimal(cap_cents) / 100)
    latest = beat(step, gpu_utilisation=utilisation)
    known = facts(job, attempt=build.attempt(beat=latest), beat=latest, at_s=at_s)
    first = decide_guard(known)
    if first.forecast is not None and job.forecast is None:
        assert first.is_new
        assert ("job.overrun_forecast" in kinds(first)) is first.forecast.over_cap
        assert ("job.late_forecast" in kinds(first)) is first.forecast.late
    second = decide_guard(stored(known, first))
    assert not second.is_new
    assert second.events == ()


def test_without_a_measured_step_the_stored_forecast_remains() -> None:
    forecast = decide_guard(facts()).forecast
    assert forecast is not None
    decision = decide_guard(facts(build.active_job(forecast=forecast), step_rate=None))
    assert (decision.forecast, decision.is_new, decision.events) == (forecast, False, ())
    assert decide_guard(facts(step_rate=None)).forecast is None


def test_an_attempt_requotes_its_job_once() -> None:
    latest = beat(20)
    quoted = replace(build.line(), usd_p50=Decimal("0.8"))
    known = facts(attempt=build.attempt(beat=latest, line=quoted), beat=latest)
    decision = decide_guard(known)
    (event,) = decision.events
    assert event.kind == "job.requoted"
    assert Decimal(event.data["usd_low"]) < Decimal(event.data["usd"]) < Decimal(event.data["usd_high"])
    assert event.data["finish_earliest"] < event.data["finish_at"] < event.data["finish_latest"]
    assert Decimal(event.data["quoted_usd"]) == Decimal("0.8")
    assert kinds(decide_guard(stored(known, decision))) == []
    second = replace(stored(known, decision), attempt=build.attempt(beat=latest, number=2))
    assert kinds(decide_guard(second)) == ["job.requoted"], "another machine is measured again"
    unquoted = replace(known.attempt, line=replace(known.attempt.line, usd_p50=None))
    (event,) = decide_guard(replace(known, attempt=unquoted)).events
    assert "quoted_usd" not in event.data


def test_an_overrun_proposes_a_cap() -> None:
    decision = decide_guard(facts(build.active_job(cap_usd=Decimal("0.01"))))
    (event,) = decision.events
    assert (event.kind, event.attempt_id) == ("job.overrun_forecast", build.attempt().id)
    assert Decimal(event.data["would_do_usd"]) > Decimal(event.data["usd"])
    assert Decimal(event.data["over_usd"]) == Decimal(event.data["usd"]) - Decimal("0.01")


def test_a_missed_deadline_is_reported() -> None:
    job = build.active_job(cap_usd=Decimal(1000), spec=build.spec(deadline=build.at(600).isoformat()))
    decision = decide_guard(facts(job))
    assert kinds(decision) == ["job.late_forecast"]
    assert decision.forecast is not None
    assert decision.forecast.finish_at - build.at(200) > timedelta(seconds=600)


@pytest.mark.parametrize(
    ("action", "signal", "consequence"),
    [
        ("notify", None, "gpubroker cancel"),
        ("drain", Signal.IDLE, "checkpoint and end"),
        ("end", Signal.IDLE_NOW, "it is"),
    ],
)
def test_an_idle_attempt_is_signalled_by_its_policy(action: str, signal: Signal | None, consequence: str) -> None:
    job = build.active_job(
        cap_usd=Decimal(1000), spec=build.spec(idle={"action": action, "no_progress_s": 300, "window_s": 60})
    )
    watched = decide_guard(facts(job)).idle_watch
    later = beat(seq=2)
    decision = decide_guard(facts(job, beat=later, idle_watch=watched, at_s=110.0 + 300))
    assert (decision.idle, decision.signal, decision.is_new) == ("no_progress", signal, True)
    (event,) = [event for event in decision.events if event.kind == "job.idle"]
    assert consequence in event.message
    assert event.data == {"kind": "no_progress", "action": action}


def _policy(name: str, window_s: int | None, **scope: str) -> Policy:
    idle = {} if window_s is None else {"idle": {"window_s": window_s}}
    return Policy.model_validate({"name": name, **scope, **idle, "max_gpus": 8})


@pytest.mark.parametrize(
    ("policies", "window_s"),
    [
        ((), IdlePolicy().window_s),
        ((("all", 70),), 70),
        ((("all", 70), ("team", 80)), 80),
        ((("user", 90), ("all", 70), ("team", 80)), 90),
        ((("user", None), ("all", 70)), 70),
    ],
)
def test_the_narrowest_policy_with_an_idle_rule_counts(
    policies: tuple[tuple[str, int | None], ...], window_s: float
) -> None:
    scopes = {"all": {}, "team": {"team": "default"}, "user": {"team": "default", "user": "ann"}}
    known = [_policy(name, seconds, **scopes[name]) for name, seconds in policies]
    assert applied_idle_policy(build.active_job(), known).window_s == window_s
    own = build.active_job(spec=build.spec(idle={"window_s": 65}))
    assert applied_idle_policy(own, known).window_s == 65
