"""The sweep destroys what nobody answers for, and never a foreign machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.decide.sweep import orphans
from broker.domain.ids import InstanceName, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState, Handle
from tests.unit.decide import build


def observed(name: str, state: InstanceState = InstanceState.RUNNING, id: str = "i-1") -> Observed:
    return Observed(handle=Handle(provider="simulated", id=id, name=InstanceName(name)), state=state)


LIVE = build.attempt(handles=(Handle(provider="simulated", id="i-1", name=build.attempt().name),))
ENDED = build.attempt(AttemptState.ENDED, ended_at=build.T0)


def test_a_live_attempts_machine_is_left_alone() -> None:
    assert orphans(build.INSTALLATION, [observed(LIVE.name)], {LIVE.id: LIVE}) == ()


def test_unknown_ended_and_second_machines_are_orphans() -> None:
    (unknown,) = orphans(build.INSTALLATION, [observed(LIVE.name)], {})
    assert unknown.attempt is None
    (late,) = orphans(build.INSTALLATION, [observed(ENDED.name)], {ENDED.id: ENDED})
    assert late.attempt is ENDED
    (twin,) = orphans(build.INSTALLATION, [observed(LIVE.name), observed(LIVE.name, id="i-2")], {LIVE.id: LIVE})
    assert twin.observed.handle.id == "i-2"


def test_what_the_cloud_calls_gone_is_no_orphan() -> None:
    assert orphans(build.INSTALLATION, [observed(LIVE.name, InstanceState.GONE)], {}) == ()


@pytest.mark.parametrize(
    "name",
    ["gb-test", "gb-test-", "gb-test-short", "gb-othr-aaaaaaaaaaaaa", "gb-test-AAAAAAAAAAAAA", "gb-testx-aaaaaaaaaaaaa",
     "gb-test-aaaaaaaaaaaaa-2", "xgb-test-aaaaaaaaaaaaa", "gb-test-aaaaaaaaaaaa1"],
)  # fmt: skip
def test_look_alike_names_are_foreign(name: str) -> None:
    assert orphans(build.INSTALLATION, [observed(name)], {}) == ()


@given(st.text(max_size=30))
def test_only_exactly_our_names_are_ours(name: str) -> None:
    ours = attempt_of(build.INSTALLATION, name)
    assert ours is None or name == f"gb-test-{ours}"
