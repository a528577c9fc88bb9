"""The tables are total, and no path through them leaves a live attempt behind a job that has ended."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.job import RESTING_JOB_STATES, TERMINAL_JOB_STATES, AttemptState, Job, JobState, Reason
from broker.lifecycle import state_machine as lifecycle
from broker.lifecycle.state_machine import (
    ATTEMPT_RULES,
    AttemptEvent,
    Effect,
    ImpossibleEvent,
    JobEvent,
    Rule,
    TransitionVerdict,
    attempt_rule,
    job_rule,
    next_job_state,
)
from broker.lifecycle.transitions import after_attempt, end_reason, step
from tests.support import build


@pytest.mark.parametrize("state", AttemptState)
@pytest.mark.parametrize("event", AttemptEvent)
def test_every_attempt_state_knows_every_event(state: AttemptState, event: AttemptEvent) -> None:
    assert isinstance(attempt_rule(state, event), Rule | TransitionVerdict)
    assert not ((state, event) in ATTEMPT_RULES and event in lifecycle.ATTEMPT_STALE[state])


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", JobEvent)
def test_every_job_state_knows_every_event(state: JobState, event: JobEvent) -> None:
    assert isinstance(job_rule(state, event), JobState | TransitionVerdict)
    assert not ((state, event) in lifecycle.JOB_RULES and event in lifecycle.JOB_STALE[state])


def test_attempt_ends_only_by_confirmed_absence_or_before_any_create() -> None:
    ways = {key for key, rule in ATTEMPT_RULES.items() if rule.next is AttemptState.ENDED}
    assert {(s, e) for s, e in ways if s is not AttemptState.PLANNED} == {
        (AttemptState.TERMINATING, AttemptEvent.ABSENT)
    }


def test_every_way_into_terminating_destroys() -> None:
    for (state, _), rule in ATTEMPT_RULES.items():
        if rule.next is AttemptState.TERMINATING and state is not AttemptState.TERMINATING:
            assert Effect.DESTROY in rule.effects


@pytest.mark.parametrize("state", [s for s in AttemptState if s is not AttemptState.ENDED])
def test_the_end_can_be_reached_from_every_live_state(state: AttemptState) -> None:
    reached, frontier = {state}, {state}
    while frontier:
        frontier = {r.next for (s, _), r in ATTEMPT_RULES.items() if s in frontier} - reached
        reached |= frontier
    assert AttemptState.ENDED in reached


@pytest.mark.parametrize("state", sorted(TERMINAL_JOB_STATES))
@pytest.mark.parametrize("event", JobEvent)
def test_nothing_leads_out_of_a_terminal_job(state: JobState, event: JobEvent) -> None:
    assert not isinstance(job_rule(state, event), JobState)


def test_only_the_end_of_its_attempt_moves_an_active_job() -> None:
    assert {e for (s, e) in lifecycle.JOB_RULES if s is JobState.ACTIVE} == {
        JobEvent.COMPLETED, JobEvent.CAPPED, JobEvent.STOPPED, JobEvent.RETRY, JobEvent.FAILED,
    }  # fmt: skip


def test_an_impossible_event_raises_and_a_late_one_changes_nothing() -> None:
    planned = build.attempt(AttemptState.PLANNED)
    with pytest.raises(ImpossibleEvent, match="planned"):
        step(planned, AttemptEvent.FINAL, build.T0)
    ended = build.attempt(AttemptState.ENDED, ended_at=build.T0)
    assert step(ended, AttemptEvent.FIRST_BEAT, build.at(9)).attempt is ended
    assert step(ended, AttemptEvent.FIRST_BEAT, build.at(9)).stale
    with pytest.raises(ImpossibleEvent, match="succeeded"):
        next_job_state(JobState.SUCCEEDED, JobEvent.ATTEMPT_PLANNED)
    assert next_job_state(JobState.QUEUED, JobEvent.CAP_RAISED) is JobState.QUEUED


@given(st.lists(st.sampled_from(AttemptEvent), max_size=40), st.booleans(), st.sampled_from(Reason))
def test_no_path_leaves_a_live_attempt_behind_a_resting_job(
    events: list[AttemptEvent], stop: bool, reason: Reason
) -> None:
    """Random events through one attempt and its job, joined as the controllers join them."""
    attempt = build.attempt(AttemptState.PLANNED)
    job: Job = build.active_job(stop_requested=stop)
    for seconds, event in enumerate(events):
        try:
            decision = step(attempt, event, build.at(seconds), reason=reason if event is AttemptEvent.FINAL else None)
        except ImpossibleEvent:
            continue
        was_live, attempt = attempt.live, decision.attempt
        if was_live and not attempt.live:
            job = after_attempt(job, attempt, end_reason(attempt, job), "", build.at(seconds))
        assert attempt.live == (job.state is JobState.ACTIVE)
        assert not (attempt.live and job.state in RESTING_JOB_STATES)


@pytest.mark.parametrize(
    ("state", "event", "stamp"),
    [
        (AttemptState.PLANNED, AttemptEvent.LEASE_TAKEN, "create_sent_at"),
        (AttemptState.LAUNCHING, AttemptEvent.CREATED, "booted_at"),
        (AttemptState.BOOTING, AttemptEvent.FIRST_BEAT, "first_beat_at"),
        (AttemptState.TRAINING, AttemptEvent.STOP, "draining_since"),
        (AttemptState.DRAINING, AttemptEvent.GRACE_OVER, "terminating_since"),
        (AttemptState.TERMINATING, AttemptEvent.ABSENT, "ended_at"),
    ],
)
def test_entering_a_state_records_when(state: AttemptState, event: AttemptEvent, stamp: str) -> None:
    moved = step(build.attempt(state), event, build.at(5)).attempt
    assert getattr(moved, stamp) == build.at(5)
    assert moved.state is not state


def test_a_failed_destroy_keeps_the_time_of_the_first_try() -> None:
    terminating = build.attempt(AttemptState.TERMINATING, terminating_since=build.T0)
    again = step(terminating, AttemptEvent.DESTROY_ERROR, build.at(60)).attempt
    assert again.terminating_since == build.T0
    assert replace(again) == terminating


def test_the_published_tables_are_current() -> None:
    page = Path("docs/design/lifecycle.md").read_text()
    assert page.endswith(lifecycle.markdown_tables()), "run `python -m broker.cli.docs_reference docs`"
