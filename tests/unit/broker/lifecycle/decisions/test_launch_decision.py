"""Decision about a launching attempt, from facts and from the outcome of its create."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt, AttemptState, Handle, Reason, Signal
from broker.lifecycle.account_refusals import AccountRefusal
from broker.lifecycle.decisions.launch_decision import (
    CREATE_POLL_S,
    Adopted,
    Created,
    CreateNotSent,
    CreateOutcome,
    CreateRefused,
    CreateUnknown,
    JobUnusable,
    LaunchCharge,
    LaunchDecision,
    LaunchFacts,
    LaunchReport,
    LaunchStep,
    NotConfirmed,
    advance_launch,
    after_create,
)
from broker.lifecycle.launch import LaunchObservation
from broker.lifecycle.state_machine import AttemptEvent
from tests.support import build
from trainer.contract.documents import Final, Outcome

CAPS = Caps(spot=True, boot_deadline_s=600)
NOW = build.at(10)
OWN = "host-1"
HANDLE = Handle(provider="simulated", id="i-1", name=build.attempt().name)
EXTRA = replace(HANDLE, id="i-2")
LISTED = Observed(handle=HANDLE, state=InstanceState.RUNNING)


def launching(**changes: Any) -> Attempt:
    return build.attempt(AttemptState.LAUNCHING, **{"launched_by": OWN} | changes)


def advance(
    attempt: Attempt | None = None,
    *,
    job: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **look: Any,
) -> LaunchDecision:
    values: dict[str, Any] = {
        "job": build.active_job(**job or {}), "attempt": attempt or launching(), "caps": CAPS, "now": NOW,
        "observation": LaunchObservation(**look),
    }  # fmt: skip
    return advance_launch(LaunchFacts(**values | (facts or {})))


def after(outcome: CreateOutcome, **changes: Any) -> LaunchDecision:
    return after_create(launching(**changes), outcome, NOW, launcher_id=OWN, poll_s=1.0)


def test_a_stop_ends_the_launch_whatever_is_listed() -> None:
    decision = advance(job={"stop_requested": True}, facts={"is_listed": False})
    assert (decision.step, decision.attempt.state) == (LaunchStep.WRITE, AttemptState.TERMINATING)
    assert decision.attempt.reason is Reason.STOPPED
    assert decision.cancels_launcher
    assert decision.report is LaunchReport.NONE
    assert decision.charge is LaunchCharge.EXTRA_LISTED


def test_the_error_of_the_create_is_named_when_the_cap_ends_it() -> None:
    decision = advance(launching(signal=Signal.CAP, detail="no answer"))
    assert (decision.attempt.reason, decision.attempt.detail) == (
        Reason.CAPPED,
        f"{AttemptEvent.CAP.value} (no answer)",
    )


def test_an_unlisted_cloud_changes_nothing() -> None:
    decision = advance(facts={"is_listed": False, "running_at": NOW})
    assert (decision.step, decision.attempt, decision.due_in_s) == (LaunchStep.WAIT, decision.before, CREATE_POLL_S)


@pytest.mark.parametrize(("look_s", "due_in_s"), [(2.0, 2.0), (9.0, CREATE_POLL_S)])
def test_listed_machines_are_recorded_while_it_waits(look_s: float, due_in_s: float) -> None:
    two = replace(build.line(), nodes=2)
    decision = advance(launching(line=two), listed=(LISTED,), facts={"running_at": NOW, "look_s": look_s})
    assert (decision.step, decision.due_in_s) == (LaunchStep.WAIT, due_in_s)
    assert (decision.attempt.handles, decision.attempt.running_at) == ((HANDLE,), NOW)
    assert decision.before == launching(line=two)


def test_listed_machines_are_confirmed_before_they_are_adopted() -> None:
    decision = advance(listed=(LISTED,), facts={"running_at": NOW})
    assert (decision.step, decision.attempt) == (LaunchStep.CONFIRM, launching(running_at=NOW))


def test_a_proven_absence_creates_again_and_charges_the_time_of_the_first() -> None:
    decision = advance(dead_s=1.0, absent=True)
    assert (decision.step, decision.attempt.state) == (LaunchStep.CREATE, AttemptState.LAUNCHING)
    assert decision.charge is LaunchCharge.UP_TO_NOW
    assert decision.attempt.create_sent_at == launching().create_sent_at


@pytest.mark.parametrize(
    ("machine", "reason", "detail"),
    [
        ({"fault": "no image", "image_refused": True}, Reason.IMAGE, "no image"),
        ({"fault": "no disk"}, Reason.INFRASTRUCTURE, "no disk"),
        ({"accelerator": "t4"}, Reason.MISMATCH, "t4"),
        ({"state": InstanceState.STOPPED}, Reason.PREEMPTED, AttemptEvent.GONE.value),
    ],
)
def test_the_listing_names_the_cause_of_an_end(machine: dict[str, Any], reason: Reason, detail: str) -> None:
    set_up = replace(CAPS, agent_start_s=30)
    decision = advance(listed=(replace(LISTED, **machine),), facts={"caps": set_up})
    assert (decision.attempt.reason, decision.report) == (reason, LaunchReport.ENDED)
    assert detail in decision.attempt.detail
    assert decision.attempt.handles == (HANDLE,)


def test_a_final_report_ends_the_attempt_with_its_reason() -> None:
    final = Final(attempt=HANDLE.name, outcome=Outcome.COMPLETED, message="done")
    ended = advance(dead_s=1.0, absent=True, final=final).attempt
    assert (ended.reason, ended.detail, ended.final) == (Reason.COMPLETED, "done", final)


def test_created_machines_boot_and_their_launcher_has_finished() -> None:
    decision = after(Created(handles=(HANDLE,)), detail="no answer")
    assert (decision.attempt.state, decision.report) == (AttemptState.BOOTING, LaunchReport.BOOTING)
    assert (decision.attempt.launched_by, decision.attempt.detail) == ("", "")
    assert decision.attempt.handles == (HANDLE,)


def test_adopted_machines_boot_and_their_launcher_may_live() -> None:
    decision = after(Adopted(handles=(HANDLE,)))
    assert (decision.attempt.state, decision.attempt.launched_by) == (AttemptState.BOOTING, OWN)


@pytest.mark.parametrize(
    ("handles", "charge"), [((), LaunchCharge.NONE), ((HANDLE, EXTRA), LaunchCharge.EXTRA_CREATED)]
)
def test_a_wrong_number_of_machines_ends_the_attempt(handles: tuple[Handle, ...], charge: LaunchCharge) -> None:
    decision = after(Created(handles=handles))
    assert (decision.attempt.reason, decision.attempt.handles) == (Reason.MISMATCH, handles)
    assert decision.attempt.detail == f"asked for 1 machines, got {len(handles)}"
    assert (decision.charge, bool(decision.prices)) == (charge, charge is LaunchCharge.EXTRA_CREATED)
    assert decision.attempt.launched_by == ""


def test_machines_that_cannot_be_confirmed_are_recorded() -> None:
    decision = after(NotConfirmed(handles=(HANDLE,), message="503"))
    assert (decision.attempt.state, decision.attempt.handles) == (AttemptState.LAUNCHING, (HANDLE,))
    assert decision.attempt.detail.endswith("cannot be checked: 503")


def test_a_refusal_names_the_cloud() -> None:
    decision = after(CreateRefused(event=AttemptEvent.NO_CAPACITY, message="sold out"), handles=(EXTRA,))
    assert (decision.attempt.reason, decision.attempt.detail) == (Reason.NO_CAPACITY, "sold out")
    assert (decision.message, decision.report) == ("runpod: sold out", LaunchReport.REFUSED)
    assert decision.attempt.handles == (EXTRA,)


def test_a_refused_account_is_named_and_existing_machines_are_recorded() -> None:
    account = AccountRefusal(key="account/x/", message="runpod refuses the key")
    refused = CreateRefused(
        event=AttemptEvent.REJECTED, message="401", reason=Reason.IMAGE, account=account, handles=(HANDLE,)
    )
    decision = after(refused)
    assert decision.message == decision.attempt.detail == "runpod refuses the key (401)"
    assert (decision.attempt.reason, decision.attempt.handles) == (Reason.IMAGE, (HANDLE,))


def test_an_unusable_job_is_the_users_error() -> None:
    decision = after(JobUnusable(message="secret HF is not set"))
    assert (decision.attempt.reason, decision.message) == (Reason.USER_ERROR, "secret HF is not set")


@pytest.mark.parametrize(
    ("changes", "is_first", "state"),
    [
        ({}, True, AttemptState.PLANNED),
        ({}, False, AttemptState.LAUNCHING),
        ({"launched_by": "host-2"}, True, AttemptState.LAUNCHING),
        ({"handles": (HANDLE,)}, True, AttemptState.LAUNCHING),
        ({"charged_to": NOW}, True, AttemptState.LAUNCHING),
    ],
)
def test_only_a_first_create_of_our_own_is_an_intent_again(
    changes: dict[str, Any], is_first: bool, state: AttemptState
) -> None:
    decision = after(CreateNotSent(message="403", is_first=is_first), **changes)
    assert (decision.attempt.state, decision.attempt.launched_by) == (state, "")
    assert decision.attempt.detail == "create was not sent: 403"
    assert decision.due_in_s == (CREATE_POLL_S if state is AttemptState.PLANNED else 1.0)


def test_an_unknown_outcome_is_looked_up() -> None:
    decision = after(CreateUnknown(message="no answer within 600 s"))
    assert decision.attempt == launching(detail="create's outcome is unknown: no answer within 600 s")
    assert decision.due_in_s == 1.0


@given(
    st.builds(
        LaunchObservation,
        listed=st.lists(st.sampled_from(InstanceState).map(lambda s: replace(LISTED, state=s)), max_size=2).map(tuple),
        missing_once=st.booleans(),
        has_heartbeats=st.booleans(),
        store_ok=st.booleans(),
        dead_s=st.none() | st.floats(0, 1000),
        absent=st.booleans(),
        is_report_unreadable=st.booleans(),
        is_superseded=st.booleans(),
    ),
    st.floats(0, 1000),
    st.none() | st.sampled_from([Signal.CAP, Signal.OUT_OF_TIME, Signal.BUDGET]),
)
def test_create_is_repeated_only_when_proven_safe(look: LaunchObservation, at: float, signal: Signal | None) -> None:
    """Every listed machine is recorded before anything is written, unless a signal ends the attempt unseen."""
    decision = advance(launching(signal=signal), facts={"observation": look, "now": build.at(at)})
    if decision.step is LaunchStep.CREATE:
        assert look.absent
        assert look.dead_s is not None
    if decision.step is LaunchStep.WRITE:
        assert decision.attempt.state is AttemptState.TERMINATING
        assert signal is not None or {m.handle for m in look.listed} <= set(decision.attempt.handles)
    assert decision.before.state is AttemptState.LAUNCHING
