"""Interpretation of the facts about one attempt."""

from typing import Any

import pytest

from broker.controllers.observation.absence import AbsenceProof
from broker.controllers.observation.attempt_observer import ObservedFacts, interpret
from broker.controllers.observation.heartbeats import HeartbeatRecord
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle
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
