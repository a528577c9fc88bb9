"""A machine whose launcher sets it up is adopted by its agent's beat only, and nothing is bought unlike its quote."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import AttemptState, Handle
from broker.lifecycle.launch import LaunchObservation, judge_launching, outdated
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
    return judge_launching(attempt, LaunchObservation(**look), caps, build.at(at))


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        ({"listed": (machine(),)}, None),
        ({"listed": (machine(),), "has_heartbeats": True}, AttemptEvent.CREATED),
        ({"has_heartbeats": True}, None),
        ({"listed": (machine(),), "dead_s": 29.0}, None),
        ({"listed": (machine(),), "dead_s": 30.0}, None),
        ({"listed": (machine(),), "dead_s": 31.0}, AttemptEvent.SETUP_FAILED),
        ({"listed": (machine(),), "dead_s": 31.0, "store_ok": False}, None),
        ({"listed": (machine(),), "dead_s": 31.0, "has_heartbeats": True}, AttemptEvent.CREATED),
        ({"listed": (machine(InstanceState.STOPPED),)}, AttemptEvent.GONE),
        ({"listed": (machine(), machine(InstanceState.GONE)), "has_heartbeats": True}, AttemptEvent.GONE),
        ({"listed": (machine(accelerator="t4"),), "has_heartbeats": True}, AttemptEvent.MISMATCH),
        ({"listed": (machine(),), "at": 600}, None),
        ({"listed": (machine(),), "at": 601}, AttemptEvent.DEADLINE),
        ({"listed": (machine(),), "at": 601, "has_heartbeats": True}, AttemptEvent.CREATED),
        ({"listed": (machine(),), "at": 601, "store_ok": False}, None),
        ({"at": 601, "store_ok": False}, AttemptEvent.DEADLINE),
        ({"at": 601, "dead_s": 99.0}, None),
        ({"at": 601, "dead_s": 99.0, "absent": True}, AttemptEvent.DEADLINE),
        ({"at": 601, "dead_s": 99.0, "listed": (machine(),)}, AttemptEvent.DEADLINE),
        ({"at": 601, "missing_once": True, "has_heartbeats": True}, None),
        ({"at": 601, "missing_once": True, "store_ok": False}, None),
        ({"at": 601, "missing_once": True, "caps": BY_ITSELF}, None),
        ({"at": 601, "missing_once": True}, AttemptEvent.DEADLINE),
        ({"at": 601, "listed": (SECOND,), "nodes": 2, "has_heartbeats": True, "missing_once": True}, None),
        ({"dead_s": 99.0}, None),
        ({"dead_s": 0.0, "absent": True}, AttemptEvent.ABSENT),
        ({"dead_s": 0.0, "absent": True, "handles": (HANDLE,)}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "is_report_unreadable": True}, None),
        ({"dead_s": 0.0, "absent": True, "is_report_unreadable": True, "handles": (HANDLE,)}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "is_report_unreadable": True, "at": 601}, AttemptEvent.DEADLINE),
        ({"dead_s": 0.0, "absent": True, "at": 601, "handles": (HANDLE,)}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "is_superseded": True}, AttemptEvent.GONE),
        ({"dead_s": 0.0, "absent": True, "final": DONE}, AttemptEvent.FINAL),
        ({"dead_s": 0.0, "absent": True, "final": DONE, "handles": (HANDLE,)}, AttemptEvent.FINAL),
        ({"dead_s": 0.0, "absent": True, "final": DONE, "at": 601, "is_superseded": True}, AttemptEvent.FINAL),
        ({"listed": (machine(),), "caps": BY_ITSELF}, AttemptEvent.CREATED),
        ({"listed": (machine(), SECOND), "caps": BY_ITSELF}, AttemptEvent.MISMATCH),
        ({"listed": (replace(SECOND, state=InstanceState.GONE), machine()), "caps": BY_ITSELF}, AttemptEvent.CREATED),
        ({"listed": (machine(InstanceState.GONE),), "caps": BY_ITSELF}, AttemptEvent.CREATED),
        ({"dead_s": 99.0, "caps": BY_ITSELF}, None),
        ({"listed": (machine(),), "has_heartbeats": True, "nodes": 2}, None),
        ({"listed": (machine(), machine()), "has_heartbeats": True, "nodes": 2}, AttemptEvent.CREATED),
        ({"listed": (machine(),), "dead_s": 31.0, "nodes": 2}, AttemptEvent.SETUP_FAILED),
        ({"listed": (machine(),), "caps": BY_ITSELF, "nodes": 2}, None),
        ({"listed": (machine(),), "caps": BY_ITSELF, "nodes": 2, "dead_s": 0.5}, AttemptEvent.SETUP_FAILED),
        ({"listed": (machine(), SECOND), "has_heartbeats": True}, AttemptEvent.MISMATCH),
        ({"listed": (SECOND,), "handles": (HANDLE,), "has_heartbeats": True, "missing_once": True}, None),
        ({"listed": (SECOND,), "handles": (HANDLE,), "has_heartbeats": True}, AttemptEvent.CREATED),
        ({"listed": (SECOND,), "handles": (HANDLE,), "caps": BY_ITSELF, "missing_once": True}, None),
        ({"listed": (machine(fault="no image"),)}, AttemptEvent.SETUP_FAILED),
        ({"listed": (machine(fault="no image"),), "has_heartbeats": True}, AttemptEvent.CREATED),
        ({"listed": (machine(), SECOND), "has_heartbeats": True, "nodes": 2}, AttemptEvent.CREATED),
    ],
)
def test_each_launch_poll_has_one_verdict(look: dict[str, Any], expected: AttemptEvent | None) -> None:
    assert verdict(**look) is expected


@given(
    st.builds(
        LaunchObservation,
        listed=st.lists(st.sampled_from(InstanceState).map(machine), max_size=2).map(tuple),
        has_heartbeats=st.booleans(),
        store_ok=st.booleans(),
        dead_s=st.none() | st.floats(0, 1000),
        absent=st.booleans(),
    ),
    st.sampled_from([SET_UP, BY_ITSELF]),
    st.floats(0, 1000),
)
def test_create_is_repeated_only_after_proven_death_and_absence(look: LaunchObservation, caps: Caps, at: float) -> None:
    told = judge_launching(build.attempt(AttemptState.LAUNCHING), look, caps, build.at(at))
    assert told is not AttemptEvent.ABSENT or (look.dead_s is not None and look.absent)
    assert told is not AttemptEvent.CREATED or look.has_heartbeats or caps is BY_ITSELF
    assert told is None or isinstance(attempt_rule(AttemptState.LAUNCHING, told), Rule)


def now_sold(**changes: Any) -> str | None:
    """Return the result of `outdated` for the offer as a later answer shows it."""
    return outdated(build.offer(), build.offer(seen_at=build.at(30), **changes), build.at(30), RISE)


def test_the_quoted_offer_is_bought_while_it_exists() -> None:
    assert now_sold() is None
    assert now_sold(usd_per_hour=Decimal("0.20"), available=True) is None
    assert now_sold(usd_per_hour=Decimal("0.3672")) is None


def test_a_change_since_the_quote_names_both_prices() -> None:
    assert "from $0.3600/h to $0.3673/h" in (now_sold(usd_per_hour=Decimal("0.3673")) or "")
    assert "sold out" in (now_sold(available=False) or "")
    assert "no longer offered" in (outdated(build.offer(), None, build.at(30), RISE) or "")
    assert "no longer offered" in (outdated(build.offer(), None, None, RISE) or "")


def test_an_answer_that_is_no_newer_than_the_quote_changes_nothing() -> None:
    assert outdated(build.offer(), None, build.T0, RISE) is None
    assert outdated(build.offer(), build.offer(usd_per_hour=Decimal(9)), build.T0, RISE) is None
