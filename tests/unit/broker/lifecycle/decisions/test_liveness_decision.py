"""Decision about a booting, training or draining attempt, from an observation."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from broker.controllers.base.events import drain_events, interruption_event, liveness_events
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt, AttemptState, Handle, Reason, Signal
from broker.lifecycle.decisions.interruption_decision import (
    DrainFacts,
    InterruptionDecision,
    decide_drain,
    interrupt,
)
from broker.lifecycle.decisions.liveness_decision import (
    SILENT,
    LivenessDecision,
    LivenessFacts,
    LivenessReport,
    decide_liveness,
)
from broker.lifecycle.liveness import AttemptObservation, LivenessTimeouts, judge
from broker.lifecycle.state_machine import AttemptEvent
from tests.support import build
from trainer.contract.documents import Final, Heartbeat, Outcome

TIMEOUTS = LivenessTimeouts()
BOOT_S = 600.0
HANDLE = Handle(provider="simulated", id="i-1", name=build.attempt().name)
RUNNING = Observed(handle=HANDLE, state=InstanceState.RUNNING)
BEAT = Heartbeat(attempt="a", boot="b", seq=1, phase="training", step=3, total_steps=9)
OBSERVATIONS = st.builds(
    AttemptObservation,
    beat=st.none() | st.just(BEAT),
    beat_age_s=st.none() | st.floats(0, 1000),
    final=st.none() | st.sampled_from(Outcome).map(lambda outcome: final(outcome)),
    listed=st.lists(
        st.builds(
            Observed,
            handle=st.just(HANDLE),
            state=st.sampled_from(InstanceState),
            fault=st.none() | st.just("no disk"),
            notice_s=st.none() | st.floats(0, 300),
            gpus=st.none() | st.just(99),
        ),
        max_size=2,
    ).map(tuple),
    absent=st.booleans(),
    missing_from_listings=st.booleans(),
    store_ok_s=st.none() | st.just(math.inf),
)


def final(outcome: Outcome = Outcome.COMPLETED, message: str = "done") -> Final:
    return Final(attempt="a", boot="b", outcome=outcome, step=9, message=message)


def facts(attempt: Attempt, observation: AttemptObservation | None, now_s: float = 10, **changes: Any) -> LivenessFacts:
    values: dict[str, Any] = {
        "job": build.active_job(), "before": attempt, "attempt": attempt, "observation": observation,
        "now": build.at(now_s), "timeouts": TIMEOUTS, "boot_deadline_s": BOOT_S, "poll_s": 0.7, "look_s": 2.0,
    }  # fmt: skip
    return LivenessFacts(**values | changes)


def decide(attempt: Attempt, now_s: float = 10, **observation: Any) -> LivenessDecision:
    return decide_liveness(facts(attempt, AttemptObservation(**observation), now_s))


@given(
    state=st.sampled_from([AttemptState.BOOTING, AttemptState.TRAINING]),
    observation=OBSERVATIONS,
    now_s=st.integers(0, 2000),
    unlisted=st.none() | st.just("503"),
)
def test_an_attempt_moves_exactly_when_an_event_is_judged(
    state: AttemptState, observation: AttemptObservation, now_s: int, unlisted: str | None
) -> None:
    attempt = build.attempt(state)
    event = judge(attempt, observation, build.at(now_s), TIMEOUTS, BOOT_S)
    decision = decide_liveness(facts(attempt, observation, now_s, unlisted=unlisted))
    assert decision.before == attempt
    if event is None:
        assert decision.attempt.state is state
        assert decision.report is not LivenessReport.TRANSITION
        return
    assert decision.report is LivenessReport.TRANSITION
    assert decision.attempt.state is not state
    assert decision.attempt.detail or decision.attempt.state is AttemptState.TRAINING
    ended = decision.attempt.state is AttemptState.TERMINATING
    assert (decision.attempt.reason is not None) >= ended
    assert decision.due_in_s == (2.0 if decision.attempt.state is AttemptState.TRAINING else 0.0)


def test_an_end_whose_reason_cannot_be_read_changes_nothing() -> None:
    attempt = build.attempt()
    decision = decide_liveness(replace(facts(attempt, None), attempt=replace(attempt, beat=BEAT)))
    assert (decision.attempt, decision.due_in_s, decision.report) == (attempt, 2.0, LivenessReport.NONE)


def test_silence_is_reported_once_and_withdrawn() -> None:
    job, attempt = build.active_job(), build.attempt()
    silent = AttemptObservation(beat=BEAT, beat_age_s=TIMEOUTS.silence_s)
    assert decide_liveness(facts(attempt, silent)).report is LivenessReport.NONE
    first = decide_liveness(facts(attempt, silent, unlisted="503"))
    assert (first.report, first.due_in_s) == (LivenessReport.SILENT, 0.7)
    assert first.attempt.detail == f"{SILENT}, and simulated cannot be listed: 503"
    (event,) = liveness_events(job, first)
    assert (event.kind, event.message) == ("attempt.silent", f"attempt 1: {first.attempt.detail}; it is charged")
    again = decide_liveness(facts(first.attempt, silent, unlisted="503"))
    assert (again.report, again.attempt) == (LivenessReport.NONE, first.attempt)
    assert decide_liveness(facts(first.attempt, replace(silent, beat_age_s=1.0))).attempt.detail == ""


def test_the_first_heartbeat_starts_training_and_records_the_machines() -> None:
    decision = decide(build.attempt(AttemptState.BOOTING), beat=BEAT, beat_age_s=0.0, listed=(RUNNING,))
    assert (decision.attempt.state, decision.attempt.handles) == (AttemptState.TRAINING, (HANDLE,))
    assert [event.kind for event in liveness_events(build.active_job(), decision)] == ["attempt.training"]


@pytest.mark.parametrize(
    ("observation", "reason", "detail"),
    [
        ({"listed": (replace(RUNNING, gpus=99),)}, Reason.MISMATCH, "GPUs, got 99"),
        ({"listed": (replace(RUNNING, fault="no disk"),)}, Reason.INFRASTRUCTURE, "no disk"),
        ({"final": final(Outcome.OOM, "out of memory")}, Reason.OOM, "out of memory"),
        ({"listed": (replace(RUNNING, state=InstanceState.GONE),)}, Reason.PREEMPTED, AttemptEvent.GONE.value),
    ],
)
def test_an_end_names_its_cause(observation: dict[str, Any], reason: Reason, detail: str) -> None:
    decision = decide(build.attempt(AttemptState.BOOTING, handles=(HANDLE,)), **observation)
    assert (decision.attempt.state, decision.attempt.reason) == (AttemptState.TERMINATING, reason)
    assert detail in decision.attempt.detail


def test_a_drain_that_a_backup_lacks_gives_the_reason() -> None:
    drained = AttemptObservation(final=final(Outcome.DRAINED))
    assert decide_liveness(facts(build.attempt(), drained)).attempt.reason is Reason.PREEMPTED
    known = facts(build.attempt(), drained, drained_for=Reason.CAPPED)
    assert decide_liveness(known).attempt.reason is Reason.CAPPED


# --- interruption


@given(
    state=st.sampled_from([AttemptState.BOOTING, AttemptState.TRAINING]),
    signal=st.none() | st.sampled_from(Signal),
    stop=st.booleans(),
)
def test_a_signal_or_a_stop_interrupts_with_a_reason(state: AttemptState, signal: Signal | None, stop: bool) -> None:
    attempt, job = build.attempt(state, signal=signal), build.active_job(stop_requested=stop)
    assume(state is AttemptState.TRAINING or signal in (None, Signal.CAP, Signal.OUT_OF_TIME, Signal.BUDGET))
    if signal is None and not stop:
        with pytest.raises(AssertionError):
            interrupt(attempt, job, build.at(10))
        return
    decision = interrupt(attempt, job, build.at(10))
    assert decision.attempt.state in (AttemptState.DRAINING, AttemptState.TERMINATING)
    assert decision.attempt.reason is not None
    event = interruption_event(job, decision)
    assert event.kind == f"attempt.{decision.attempt.state.value}"
    assert event.message == f"attempt 1 is {decision.attempt.state.value}: {decision.attempt.detail}"


def drain(now_s: float = 10, **observation: Any) -> InterruptionDecision:
    attempt = build.attempt(AttemptState.DRAINING, draining_since=build.at(0), reason=Reason.STOPPED)
    return decide_drain(
        DrainFacts(
            job=build.active_job(), before=attempt, attempt=attempt, observation=AttemptObservation(**observation),
            caps=Caps(spot=True), now=build.at(now_s), timeouts=TIMEOUTS, drain_budget=build.drain_budget(),
            poll_s=1.0, order_s=6.0,
        )
    )  # fmt: skip


def test_a_drain_is_waited_for() -> None:
    decision = drain(beat=BEAT, beat_age_s=1.0)
    assert (decision.attempt, decision.event, decision.due_in_s) == (decision.before, None, 1.0)
    assert drain_events(build.active_job(), decision) == ()


@pytest.mark.parametrize(
    ("now_s", "observation", "event", "reason"),
    [
        (10, {"final": final(Outcome.DRAINED)}, AttemptEvent.FINAL, Reason.STOPPED),
        (10, {"final": final(Outcome.COMPLETED)}, AttemptEvent.FINAL, Reason.COMPLETED),
        (10, {"absent": True}, AttemptEvent.GONE, Reason.STOPPED),
        (67, {"beat": BEAT, "beat_age_s": 1.0}, AttemptEvent.GRACE_OVER, Reason.STOPPED),
    ],
)
def test_a_drain_ends(now_s: float, observation: dict[str, Any], event: AttemptEvent, reason: Reason) -> None:
    decision = drain(now_s, **observation)
    assert (decision.event, decision.attempt.state) == (event, AttemptState.TERMINATING)
    assert (decision.attempt.reason, decision.due_in_s) == (reason, 0.0)
    assert drain_events(build.active_job(), decision) == ()
