"""A machine whose launcher sets it up is adopted by its agent's beat only, and nothing is bought unlike its quote."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import AttemptState, Handle
from broker.lifecycle.launch import LaunchLook, judge_launching, outdated
from broker.lifecycle.state_machine import AttemptEvent, Rule, attempt_rule
from tests.support import build
from trainer.contract.documents import Final, Outcome

SET_UP = Caps(spot=True, boot_deadline_s=600, agent_start_s=30)
BY_ITSELF = Caps(spot=True, boot_deadline_s=600)
HANDLE = Handle(provider="simulated", id="i-1", name=build.attempt().name)

DONE = Final(attempt=HANDLE.name, outcome=Outcome.COMPLETED)
RISE = Decimal("0.02")


def machine(state: InstanceState = InstanceState.RUNNING, **changes: Any) -> Observed:
    return Observed(handle=HANDLE, state=state, **changes)


SECOND = replace(machine(), handle=replace(HANDLE, id="i-2"))


def verdict(
    caps: Caps = SET_UP, at: float = 10, handles: tuple[Handle, ...] = (), nodes: int = 1, **look: Any
) -> AttemptEvent | None:
    line = replace(build.line(), nodes=nodes)
    attempt = build.attempt(AttemptState.LAUNCHING, handles=handles, line=line)
    return judge_launching(attempt, LaunchLook(**look), caps, build.at(at))


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        ({"seen": (machine(),)}, None),
        ({"seen": (machine(),), "beating": True}, AttemptEvent.CREATED),
        ({"beating": True}, None),
        ({"seen": (machine(),), "dead_s": 29.0}, None),
        ({"seen": (machine(),), "dead_s": 30.0}, None),
        ({"seen": (machine(),), "dead_s": 31.0}, AttemptEvent.SETUP_FAILED),
        ({"seen": (machine(),), "dead_s": 31.0, "store_ok": False}, None),
        ({"seen": (machine(),), "dead_s": 31.0, "beating": True}, AttemptEvent.CREATED),
        ({"seen": (machine(InstanceState.STOPPED),)}, AttemptEvent.GONE),
        ({"seen": (machine(), machine(InstanceState.GONE)), "beating": True}, AttemptEvent.GONE),
        ({"seen": (machine(accelerator="t4"),), "beating": True}, AttemptEvent.MISMATCH),
        ({"seen": (machine(),), "at": 600}, None),
        ({"seen": (machine(),), "at": 601}, AttemptEvent.DEADLINE),
        ({"seen": (machine(),), "at": 601, "beating": True}, AttemptEvent.CREATED),
        ({"seen": (machine(),), "at": 601, "store_ok": False}, None),
        ({"at": 601, "store_ok": False}, AttemptEvent.DEADLINE),
        ({"at": 601, "dead_s": 99.0}, None),
        ({"at": 601, "dead_s": 99.0, "absent": True}, AttemptEvent.DEADLINE),
        ({"at": 601, "dead_s": 99.0, "seen": (machine(),)}, AttemptEvent.DEADLINE),
        ({"at": 601, "omits": True, "beating": True}, None),
        ({"at": 601, "omits": True, "store_ok": False}, None),
        ({"at": 601, "omits": True, "caps": BY_ITSELF}, None),
        ({"at": 601, "omits": True}, AttemptEvent.DEADLINE),
        ({"at": 601, "seen": (SECOND,), "nodes": 2, "beating": True, "omits": True}, None),
        ({"dead_s": 99.0}, None),
        ({"dead_s": 0.0, "absent": True}, AttemptEvent.ABSENT),
        ({"dead_s": 0.0, "absent": True, "handles": (HANDLE,)}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "unread": True}, None),
        ({"dead_s": 0.0, "absent": True, "unread": True, "handles": (HANDLE,)}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "unread": True, "at": 601}, AttemptEvent.DEADLINE),
        ({"dead_s": 0.0, "absent": True, "at": 601, "handles": (HANDLE,)}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "followed": True}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "final": DONE}, AttemptEvent.FINAL),
        ({"dead_s": 0.0, "absent": True, "final": DONE, "handles": (HANDLE,)}, AttemptEvent.FINAL),
        ({"dead_s": 0.0, "absent": True, "final": DONE, "at": 601, "followed": True}, AttemptEvent.FINAL),
        ({"seen": (machine(),), "caps": BY_ITSELF}, AttemptEvent.CREATED),
        ({"seen": (machine(), SECOND), "caps": BY_ITSELF}, AttemptEvent.MISMATCH),
        ({"seen": (replace(SECOND, state=InstanceState.GONE), machine()), "caps": BY_ITSELF}, AttemptEvent.CREATED),
        ({"seen": (machine(InstanceState.GONE),), "caps": BY_ITSELF}, AttemptEvent.CREATED),
        ({"dead_s": 99.0, "caps": BY_ITSELF}, None),
        ({"seen": (machine(),), "beating": True, "nodes": 2}, None),
        ({"seen": (machine(), machine()), "beating": True, "nodes": 2}, AttemptEvent.CREATED),
        ({"seen": (machine(),), "dead_s": 31.0, "nodes": 2}, AttemptEvent.SETUP_FAILED),
        ({"seen": (machine(),), "caps": BY_ITSELF, "nodes": 2}, None),
        ({"seen": (machine(),), "caps": BY_ITSELF, "nodes": 2, "dead_s": 0.5}, AttemptEvent.SETUP_FAILED),
        ({"seen": (machine(), SECOND), "beating": True}, AttemptEvent.MISMATCH),
        ({"seen": (SECOND,), "handles": (HANDLE,), "beating": True, "omits": True}, None),
        ({"seen": (SECOND,), "handles": (HANDLE,), "beating": True}, AttemptEvent.CREATED),
        ({"seen": (SECOND,), "handles": (HANDLE,), "caps": BY_ITSELF, "omits": True}, None),
        ({"seen": (machine(fault="no image"),)}, AttemptEvent.SETUP_FAILED),
        ({"seen": (machine(fault="no image"),), "beating": True}, AttemptEvent.CREATED),
        ({"seen": (machine(), SECOND), "beating": True, "nodes": 2}, AttemptEvent.CREATED),
    ],
)
def test_what_a_look_amounts_to(look: dict[str, Any], expected: AttemptEvent | None) -> None:
    assert verdict(**look) is expected


@given(
    st.builds(
        LaunchLook,
        seen=st.lists(st.sampled_from(InstanceState).map(machine), max_size=2).map(tuple),
        beating=st.booleans(),
        store_ok=st.booleans(),
        dead_s=st.none() | st.floats(0, 1000),
        absent=st.booleans(),
    ),
    st.sampled_from([SET_UP, BY_ITSELF]),
    st.floats(0, 1000),
)
def test_create_is_repeated_only_after_proven_death_and_absence(look: LaunchLook, caps: Caps, at: float) -> None:
    told = judge_launching(build.attempt(AttemptState.LAUNCHING), look, caps, build.at(at))
    assert told is not AttemptEvent.ABSENT or (look.dead_s is not None and look.absent)
    assert told is not AttemptEvent.CREATED or look.beating or caps is BY_ITSELF
    assert told is None or isinstance(attempt_rule(AttemptState.LAUNCHING, told), Rule)


def now_sold(**changes: Any) -> str | None:
    """`outdated` against the offer as a later answer shows it."""
    return outdated(build.offer(), build.offer(seen_at=build.at(30), **changes), build.at(30), RISE)


def test_what_was_quoted_is_bought_while_it_stands() -> None:
    assert now_sold() is None
    assert now_sold(usd_per_hour=Decimal("0.20"), available=True) is None
    assert now_sold(usd_per_hour=Decimal("0.3672")) is None


def test_what_changed_since_the_quote_is_named_with_both_prices() -> None:
    assert "from $0.3600/h to $0.3673/h" in (now_sold(usd_per_hour=Decimal("0.3673")) or "")
    assert "sold out" in (now_sold(available=False) or "")
    assert "no longer offered" in (outdated(build.offer(), None, build.at(30), RISE) or "")
    assert "no longer offered" in (outdated(build.offer(), None, None, RISE) or "")


def test_an_answer_that_is_no_newer_than_the_quote_changes_nothing() -> None:
    assert outdated(build.offer(), None, build.T0, RISE) is None
    assert outdated(build.offer(), build.offer(usd_per_hour=Decimal(9)), build.T0, RISE) is None
