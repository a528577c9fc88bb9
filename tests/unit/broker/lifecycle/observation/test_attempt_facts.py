"""Interpretation of the facts about one attempt."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle
from broker.lifecycle.liveness import AttemptObservation, LivenessTimeouts, poll_share
from broker.lifecycle.observation.attempt_facts import (
    MIN_POLL_S,
    HeartbeatRecord,
    ObservedFacts,
    final_is_likely,
    interpret,
    next_poll_s,
    steady_poll_s,
)
from broker.lifecycle.observation.proof import AbsenceProof
from tests.support import build

MACHINE = Observed(
    handle=Handle(provider="simulated", id="i-1", name=build.attempt().name), state=InstanceState.RUNNING
)


def facts(**changes: Any) -> ObservedFacts:
    values: dict[str, Any] = {
        "has_beaten": True, "heartbeat": None, "read_at": 100.0, "watched_from": 40.0, "peers_silent_s": None,
        "store_ok_s": 60.0,
    }  # fmt: skip
    return ObservedFacts(**values | changes)


@pytest.mark.parametrize(("watched", "every_s"), [(0, 2.0), (400, 2.0), (4000, 20.0), (50_000, 60.0)])
def test_many_steady_attempts_are_polled_at_the_same_total_rate(watched: int, every_s: float) -> None:
    assert steady_poll_s(watched, 2.0) == every_s
    assert steady_poll_s(watched, 90.0) >= 90.0


def test_silence_counts_from_the_latest_change_of_a_heartbeat() -> None:
    observation = interpret(facts(heartbeat=HeartbeatRecord(etag="a", changed=90.0, progressed=80.0)))
    assert (observation.beat_age_s, observation.progress_age_s) == (10.0, None)


@pytest.mark.parametrize(("has_beaten", "age_s"), [(True, 60.0), (False, None)])
def test_silence_of_an_unlisted_heartbeat_counts_from_the_first_poll(has_beaten: bool, age_s: float | None) -> None:
    assert interpret(facts(has_beaten=has_beaten)).beat_age_s == age_s


@pytest.mark.parametrize(
    ("changes", "shows_end"),
    [
        ({}, False),
        ({"machines": (MACHINE,)}, False),
        ({"proof": AbsenceProof(proven_at=build.T0)}, True),
        ({"proof": AbsenceProof(missing_for_seconds=True)}, True),
        ({"proof": AbsenceProof(lost=frozenset({"i-1"}))}, True),
    ],
)
def test_each_level_of_absence_may_be_an_end(changes: dict[str, Any], shows_end: bool) -> None:
    found = facts(**changes)
    assert found.shows_end == shows_end
    assert interpret(found).absent == found.proof.proven


TIMEOUTS = LivenessTimeouts()
SILENCE_S = st.none() | st.just(math.inf) | st.floats(0, 1000)


@pytest.mark.parametrize(
    ("age_s", "peers_silent_s", "is_likely"),
    [
        (0.0, None, False),
        (TIMEOUTS.three_beats_s, None, True),
        (0.0, TIMEOUTS.three_beats_s, True),
        (0.0, math.inf, False),  # a node that has not started yet
    ],
)
def test_a_missing_heartbeat_may_have_announced_the_end(
    age_s: float, peers_silent_s: float | None, is_likely: bool
) -> None:
    record = HeartbeatRecord(etag="a", changed=100.0 - age_s)
    assert final_is_likely(facts(heartbeat=record, peers_silent_s=peers_silent_s), TIMEOUTS) is is_likely
    assert not final_is_likely(facts(peers_silent_s=peers_silent_s), TIMEOUTS)


@given(st.floats(0, 1000), SILENCE_S, st.floats(0.1, 50))
def test_polls_of_a_silent_machine_stay_within_the_share(
    age_s: float, peers_silent_s: float | None, calls_per_s: float
) -> None:
    observation = AttemptObservation(beat_age_s=age_s, peers_silent_s=peers_silent_s)
    share, poll_s = poll_share(observation, TIMEOUTS), next_poll_s(observation, TIMEOUTS, calls_per_s)
    assert (poll_s is None) == (share == 0.0)
    if poll_s is not None:
        assert poll_s >= MIN_POLL_S
        assert poll_s * share * calls_per_s >= 1 - 1e-9


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.booleans())
def test_ages_are_never_negative(changed: float, progressed: float, watched_from: float, has_beaten: bool) -> None:
    """The list of heartbeats is never older than a change that it showed; a progress is read after it."""
    record = HeartbeatRecord(etag="a", changed=min(changed, 100.0), progressed=progressed)
    for heartbeat in (record, None):
        observation = interpret(facts(heartbeat=heartbeat, watched_from=watched_from, has_beaten=has_beaten))
        assert observation.beat_age_s is None or observation.beat_age_s >= 0
        assert (observation.beat_age_s is None) == (heartbeat is None and not has_beaten)
