"""Terminating attempts: the decision that follows from each fact."""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, AttemptState, Handle, JobState, PriceChange, Reason
from broker.domain.money import ZERO, LedgerKind
from broker.lifecycle.decisions.termination_decision import (
    RECHECK_S,
    STUCK_S,
    after_destroy,
    is_reported,
    terminate,
    termination_events,
)
from broker.lifecycle.decisions.termination_facts import (
    EndFactsNeeded,
    EndReport,
    MissingEndFacts,
    TerminationDecision,
    TerminationFacts,
    TerminationReport,
    TerminationSettings,
    TerminationStep,
)
from broker.lifecycle.observation.proof import AbsenceProof
from tests.support import build
from trainer.contract.documents import Final, Outcome

NOW = build.at(100)
SETTINGS = TerminationSettings(destroy_alert=3)
HANDLE = Handle(provider="simulated", id="i-1", name=build.attempt().name)
OTHER = replace(HANDLE, id="i-2")
FINAL = Final(attempt=build.attempt().id, boot="b", outcome=Outcome.USER_ERROR, step=1, message="no such file")
PROVEN = AbsenceProof(proven_at=build.at(90))
NOTHING = EndReport(final=None, drain_reason=None)


def machine(state: InstanceState = InstanceState.RUNNING, handle: Handle = HANDLE) -> Observed:
    return Observed(handle=handle, state=state)


def ending(**changes: Any) -> Attempt:
    values: dict[str, Any] = {"terminating_since": build.at(50), "booted_at": build.at(10), "handles": (HANDLE,)}
    return build.attempt(AttemptState.TERMINATING, **values | changes)


def facts(attempt: Attempt | None = None, job: dict[str, Any] | None = None, **changes: Any) -> TerminationFacts:
    values: dict[str, Any] = {
        "job": build.active_job(**job or {}), "attempt": attempt or ending(), "now": NOW, "settings": SETTINGS,
    }  # fmt: skip
    return TerminationFacts(**values | changes)


def decided(given_facts: TerminationFacts) -> TerminationDecision:
    decision = terminate(given_facts)
    assert isinstance(decision, TerminationDecision)
    return decision


def closed(attempt: Attempt | None = None, **changes: Any) -> TerminationDecision:
    values: dict[str, Any] = {"absence": PROVEN, "report": NOTHING, "host_record": ()}
    decision = decided(facts(attempt, **values | changes))
    assert decision.step is TerminationStep.CLOSE
    return decision


def missing(given_facts: TerminationFacts) -> MissingEndFacts:
    needed = terminate(given_facts)
    assert isinstance(needed, EndFactsNeeded)
    assert needed.facts is given_facts
    return needed.missing


# --- hold


KEPT = {"spec_changes": {"keep_on_failure": 600}}


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, TerminationStep.KEEP),
        ({"machines": (machine(),)}, TerminationStep.KEEP),
        ({"machines": (machine(InstanceState.GONE),)}, TerminationStep.DESTROY),
        ({"machines": (machine(InstanceState.STOPPED),)}, TerminationStep.DESTROY),
        ({"now": build.at(650)}, TerminationStep.DESTROY),
        ({"job": KEPT | {"stop_requested": True}}, TerminationStep.DESTROY),
    ],
)
def test_a_failed_machine_is_kept_for_its_time(changes: dict[str, Any], step: TerminationStep) -> None:
    decision = decided(facts(ending(final=FINAL), **{"job": KEPT} | changes))
    assert decision.step is step
    if step is TerminationStep.KEEP:
        assert (decision.attempt, decision.destroys) == (decision.before, ())
        assert decision.due_in_s == SETTINGS.look_s


def test_the_last_wait_of_a_kept_machine_ends_in_time() -> None:
    decision = decided(facts(ending(final=FINAL), job=KEPT, now=build.at(649)))
    assert decision.due_in_s == 1.0


# --- destroy


def test_recorded_and_listed_machines_are_destroyed() -> None:
    decision = decided(facts(machines=(machine(), machine(handle=OTHER)), exists=True, is_launcher_dead=False))
    assert decision.destroys == (HANDLE, OTHER)
    assert decision.stops_launcher
    assert decision.due_in_s == RECHECK_S


def test_a_listed_machine_is_recorded_and_takes_a_proof_back() -> None:
    attempt = ending(handles=(), absent_at=build.at(60))
    assert decided(facts(attempt, machines=(machine(),), exists=True)).attempt == replace(
        attempt, absent_at=None, handles=(HANDLE,)
    )
    assert decided(facts(attempt, machines=(machine(),))).attempt == attempt


def test_an_attempt_of_a_silent_cloud_is_left_to_other_brokers_at_once() -> None:
    assert decided(facts(is_listed=False)).due_in_s == 0.0


def test_a_failed_destroy_is_counted_and_reported_with_growing_intervals() -> None:
    given_facts = facts()
    decision, reported = decided(given_facts), []
    for times in range(1, 13):
        decision = after_destroy(given_facts, decision, ["", "503"], NOW)
        assert (decision.attempt.destroy_failures, decision.attempt.detail) == (times, "503")
        reported += [times] if decision.report is TerminationReport.FAILED else []
        for event in termination_events(decision):
            assert (event.kind, event.message) == ("attempt.destroy_failed", f"503 ({times} times)")
    assert reported == [3, 6, 12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"exists": True}, "still lists it"),
        ({"exists": True, "error": "503"}, "simulated cannot be listed: 503"),
        ({"exists": True, "error": "503", "is_launcher_dead": False}, "gpubroker launcher lost"),
    ],
)
def test_an_end_that_takes_long_says_for_what_it_waits(changes: dict[str, Any], message: str) -> None:
    given_facts = facts(**changes)
    decision = decided(given_facts)
    late = build.at(50 + STUCK_S)
    assert after_destroy(given_facts, decision, [""], late) is decision
    stuck = after_destroy(given_facts, decision, [""], late + timedelta(seconds=1))
    assert message in stuck.attempt.detail
    assert stuck.attempt.destroy_failures == bool(message)


def test_without_a_time_no_end_takes_long() -> None:
    given_facts = facts(ending(terminating_since=None), exists=True)
    decision = decided(given_facts)
    assert after_destroy(given_facts, decision, [], build.at(9999)) is decision


# --- facts that are read when they matter


def test_facts_are_read_where_the_decision_depends_on_them() -> None:
    proven = facts(absence=PROVEN)
    assert missing(proven) is MissingEndFacts.REPORT
    image = facts(ending(reason=Reason.IMAGE), absence=PROVEN, report=NOTHING)
    assert missing(image) is MissingEndFacts.EARLIER_ATTEMPTS
    hung = facts(ending(reason=Reason.HUNG), absence=PROVEN, report=NOTHING)
    assert missing(hung) is MissingEndFacts.HOST_RECORD
    assert decided(replace(hung, host_trust="own")).blocks == ()


def test_an_unreadable_report_ends_the_charges_only() -> None:
    decision = decided(facts(absence=PROVEN, is_report_unreadable=True))
    assert decision.step is TerminationStep.WAIT
    assert decision.attempt == replace(decision.before, absent_at=PROVEN.proven_at)
    assert (decision.job_after, decision.charge) == (None, None)
    assert termination_events(decision) == ()


# --- close


@pytest.mark.parametrize(
    ("attempt", "changes", "absent_s"),
    [
        (ending(), {}, 90),
        (ending(), {"last_possible_end": build.at(70)}, 70),
        (ending(), {"self_stopped_by": build.at(60), "last_possible_end": build.at(70)}, 60),
        (ending(charged_to=build.at(80)), {"self_stopped_by": build.at(60)}, 80),
        (ending(absent_at=build.at(55)), {}, 55),
        (ending(reason=Reason.NO_CAPACITY, handles=(), booted_at=None), {}, 0),
    ],
)
def test_charges_end_at_the_earliest_known_end(attempt: Attempt, changes: dict[str, Any], absent_s: float) -> None:
    decision = closed(attempt, **changes)
    assert decision.attempt.absent_at == build.at(absent_s)
    assert decision.charge is not None
    assert decision.charge.until == build.at(absent_s)


def test_the_last_charge_knows_the_latest_prices() -> None:
    doubled = PriceChange(since=build.T0, usd_per_hour=Decimal("0.72"))
    charge, dearer = closed().charge, closed(prices=(doubled,)).charge
    assert charge is not None
    assert dearer is not None
    assert dearer.prices == (doubled,)
    assert dearer.usd == 2 * charge.usd == Decimal("0.018")


def test_an_image_that_two_hosts_cannot_pull_fails_the_job() -> None:
    attempt = ending(reason=Reason.IMAGE, detail="manifest unknown")
    first = closed(attempt, earlier_attempts=(build.attempt(AttemptState.ENDED, reason=Reason.PREEMPTED),))
    again = closed(attempt, earlier_attempts=(build.attempt(AttemptState.ENDED, reason=Reason.IMAGE),))
    assert first.job_after is not None
    assert again.job_after is not None
    assert (first.job_after.state, again.job_after.state) == (JobState.RECOVERING, JobState.FAILED)
    (block,) = first.blocks
    assert (block.key, block.reason) == (attempt.line.offer.host_key, "manifest unknown")
    assert block.for_s == SETTINGS.sold_out_s


def test_a_host_with_a_bad_record_is_avoided() -> None:
    attempt = ending(reason=Reason.HUNG)
    record = (replace(attempt, state=AttemptState.ENDED, ended_at=build.at(99)),) * 2
    assert closed(attempt).blocks == ()
    (block,) = closed(attempt, host_record=record).blocks
    assert block.key == attempt.line.offer.host_key
    assert block.for_s > 0


def test_a_drain_request_names_the_reason_that_the_backup_lacks() -> None:
    final = replace_outcome(Outcome.DRAINED)
    decision = closed(report=EndReport(final=final, drain_reason=Reason.CAPPED))
    assert (decision.attempt.final, decision.attempt.reason) == (final, Reason.CAPPED)
    assert closed(report=EndReport(final=final, drain_reason=None)).attempt.reason is Reason.PREEMPTED


def replace_outcome(outcome: Outcome) -> Final:
    return FINAL.model_copy(update={"outcome": outcome})


def test_the_end_is_reported_with_its_cost_and_the_job() -> None:
    decision = closed(report=EndReport(final=FINAL, drain_reason=None))
    ended, advanced = termination_events(decision)
    assert (ended.kind, ended.attempt_id) == ("attempt.ended", decision.attempt.id)
    assert ended.data == {"reason": "user_error", "usd": str(decision.spent_usd)}
    assert (advanced.kind, advanced.attempt_id) == ("job.failed", None)
    assert advanced.message == "job job: failed (user_error)"


def test_a_plan_that_changes_after_memory_ran_out_is_reported() -> None:
    report = EndReport(final=replace_outcome(Outcome.OOM), drain_reason=None)
    events = termination_events(closed(report=report))
    assert [event.kind for event in events] == ["attempt.ended", "job.replanned", "job.recovering"]


# --- properties


SECONDS = st.floats(0, 200)
TIMES = st.none() | st.builds(build.at, SECONDS)
STATES = st.sampled_from(list(InstanceState))
ATTEMPTS = st.builds(
    ending,
    reason=st.none() | st.sampled_from([Reason.IMAGE, Reason.HUNG, Reason.STOPPED, Reason.NO_CAPACITY, Reason.CAPPED]),
    charged_to=TIMES,
    absent_at=st.none(),
    booted_at=TIMES,
    handles=st.sampled_from([(), (HANDLE,), (HANDLE, OTHER)]),
    reserved_usd=st.decimals(0, 1, places=4),
    final=st.sampled_from([None, FINAL]),
    launched_by=st.sampled_from(["", "host-1"]),
)
FACTS = st.builds(
    facts,
    ATTEMPTS,
    job=st.sampled_from([{}, KEPT, {"stop_requested": True}]),
    is_listed=st.booleans(),
    exists=st.booleans(),
    machines=st.lists(st.builds(machine, STATES, st.sampled_from([HANDLE, OTHER])), max_size=2).map(tuple),
    is_launcher_dead=st.booleans(),
    absence=st.builds(AbsenceProof, missing_once=st.booleans(), proven_at=TIMES),
    last_possible_end=TIMES,
    self_stopped_by=TIMES,
    is_report_unreadable=st.booleans(),
)


def complete(needed: EndFactsNeeded) -> TerminationFacts:
    if needed.missing is MissingEndFacts.REPORT:
        return replace(needed.facts, report=EndReport(final=needed.facts.attempt.final, drain_reason=None))
    if needed.missing is MissingEndFacts.EARLIER_ATTEMPTS:
        return replace(needed.facts, earlier_attempts=())
    return replace(needed.facts, host_record=())


@given(FACTS)
def test_an_attempt_ends_only_when_absence_is_proven(given_facts: TerminationFacts) -> None:
    """The reservation is released once, and no time is charged again or after the proof."""
    rounds = 0
    while isinstance(decision := terminate(given_facts), EndFactsNeeded):
        given_facts, rounds = complete(decision), rounds + 1
    assert rounds <= len(MissingEndFacts)
    attempt, before = decision.attempt, decision.before
    assert (decision.step is TerminationStep.CLOSE) == (not attempt.live) == (decision.job_after is not None)
    assert bool(decision.ledger) == (decision.charge is not None) == (not attempt.live)
    proven_at = given_facts.absence.proven_at
    if proven_at is None:
        assert attempt.live
        assert decision.step is TerminationStep.KEEP or {HANDLE.id for HANDLE in before.handles} <= {
            handle.id for handle in decision.destroys
        }
        return
    assert attempt.absent_at is not None
    assert attempt.absent_at <= max(proven_at, before.charged_to or build.T0, before.create_sent_at or build.T0)
    assert before.charged_to is None or attempt.absent_at >= before.charged_to
    for entry in decision.ledger:
        assert (entry.kind, entry.usd) == (LedgerKind.RELEASE, max(ZERO, before.reserved_usd - decision.spent_usd))
    assert decision.charge is None or decision.charge.usd >= 0


@given(FACTS, st.lists(st.sampled_from(["", "503"]), max_size=3), st.builds(build.at, st.floats(50, 1000)))
def test_no_outcome_of_a_destroy_ends_an_attempt(
    given_facts: TerminationFacts, errors: list[str], now: datetime
) -> None:
    decision = terminate(replace(given_facts, absence=AbsenceProof()))
    assert isinstance(decision, TerminationDecision)
    after = after_destroy(given_facts, decision, errors, now)
    assert after.attempt.state is AttemptState.TERMINATING
    assert after.attempt.destroy_failures - decision.attempt.destroy_failures in (0, 1)
    assert not any(errors) or after.attempt.detail == "503"
    assert (after.job_after, after.charge) == (None, None)


@given(st.integers(1, 100), st.integers(1, 10_000))
def test_repeated_failures_are_reported_at_each_doubling(first: int, times: int) -> None:
    assert is_reported(times, first) == (times in {first * 2**power for power in range(15)})
