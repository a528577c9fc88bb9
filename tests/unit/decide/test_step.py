"""How attempts end, and what that makes of their job."""

from dataclasses import replace
from decimal import Decimal

import pytest

from broker.decide.step import after_attempt, back_off_s, end_reason, kept_until, reason_of, setup_reason
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState, Handle, JobState, Reason, Signal
from tests.unit.decide import build
from trainer.contract.rendezvous import Final, Outcome


def final(outcome: Outcome) -> Final:
    return Final(attempt="x", outcome=outcome)


def ending(**changes: object) -> build.Attempt:
    return build.attempt(AttemptState.TERMINATING, **changes)


def test_completed_beats_everything() -> None:
    attempt = ending(reason=Reason.STOPPED, signal=Signal.CAP, final=final(Outcome.COMPLETED))
    assert end_reason(attempt, build.active_job(stop_requested=True)) is Reason.COMPLETED


def test_a_user_stop_beats_the_cap_and_the_cap_beats_a_user_error() -> None:
    capped = ending(signal=Signal.CAP, final=final(Outcome.USER_ERROR))
    assert end_reason(capped, build.active_job(stop_requested=True)) is Reason.STOPPED
    assert end_reason(capped, build.active_job()) is Reason.CAPPED
    assert end_reason(ending(reason=Reason.STOPPED), build.active_job()) is Reason.STOPPED


def test_a_user_error_beats_a_retry_and_nothing_known_is_infrastructure() -> None:
    failed = ending(reason=Reason.PREEMPTED, final=final(Outcome.USER_ERROR))
    assert end_reason(failed, build.active_job()) is Reason.USER_ERROR
    assert end_reason(ending(reason=Reason.PREEMPTED), build.active_job()) is Reason.PREEMPTED
    assert end_reason(ending(), build.active_job()) is Reason.INFRASTRUCTURE


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_meaning(outcome: Outcome) -> None:
    expected = Reason.CAPPED if outcome is Outcome.DRAINED else Reason(outcome.value)
    assert reason_of(final(outcome), Reason.CAPPED) is expected


def test_a_machine_that_drained_unasked_was_preempted() -> None:
    assert reason_of(final(Outcome.DRAINED), None) is Reason.PREEMPTED


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (Reason.COMPLETED, JobState.SUCCEEDED),
        (Reason.STOPPED, JobState.CANCELLED),
        (Reason.CAPPED, JobState.CAPPED),
        (Reason.USER_ERROR, JobState.FAILED),
        (Reason.DATA, JobState.FAILED),
        (Reason.PREEMPTED, JobState.RECOVERING),
        (Reason.OOM, JobState.RECOVERING),
        (Reason.QUOTE_EXPIRED, JobState.RECOVERING),
    ],
)
def test_what_an_end_makes_of_the_job(reason: Reason, state: JobState) -> None:
    after = after_attempt(build.active_job(), build.attempt(), reason, "", build.at(1))
    assert after.state is state
    assert (after.finished_at is None) == (state is JobState.RECOVERING)


def test_retries_are_counted_and_run_out() -> None:
    job = build.active_job(spec_changes={"retry": {"max": 1}})
    once = after_attempt(job, build.attempt(), Reason.PREEMPTED, "", build.T0)
    assert (once.state, once.retries_used) == (JobState.RECOVERING, 1)
    job = build.active_job(spec_changes={"retry": {"max": 1}}, retries_used=1)
    assert after_attempt(job, build.attempt(), Reason.PREEMPTED, "", build.T0).state is JobState.FAILED


@pytest.mark.parametrize("reason", [Reason.DEADMAN, Reason.NO_CAPACITY, Reason.QUOTE_EXPIRED])
def test_what_was_nobodys_fault_costs_no_retry(reason: Reason) -> None:
    job = build.active_job(spec_changes={"retry": {"max": 0}})
    after = after_attempt(job, build.attempt(), reason, "", build.T0)
    assert (after.state, after.retries_used) == (JobState.RECOVERING, 0)


def test_causes_that_the_spec_excludes_are_not_retried() -> None:
    job = build.active_job(spec_changes={"retry": {"on": ["lost"]}})
    assert after_attempt(job, build.attempt(), Reason.PREEMPTED, "", build.T0).state is JobState.FAILED


def test_an_image_that_is_refused_twice_ends_the_job_and_once_is_tried_elsewhere() -> None:
    once = after_attempt(build.active_job(), build.attempt(), Reason.IMAGE, "no such image", build.T0)
    assert (once.state, once.retries_used) == (JobState.RECOVERING, 1)
    job = build.active_job(retries_used=1)
    twice = after_attempt(job, build.attempt(), Reason.IMAGE, "no such image", build.T0, image_refused=True)
    assert (twice.state, twice.reason) == (JobState.FAILED, "no such image")
    none_left = build.active_job(spec_changes={"retry": {"max": 0}})
    assert after_attempt(none_left, build.attempt(), Reason.IMAGE, "", build.T0).state is JobState.FAILED


def test_a_machine_that_cannot_be_set_up_is_at_fault_unless_its_image_is() -> None:
    handle = Handle(provider="x", id="1", name=build.attempt().name)
    broken = Observed(handle=handle, state=InstanceState.RUNNING, fault="docker does not answer")
    assert setup_reason((broken,)) is Reason.INFRASTRUCTURE
    assert setup_reason((broken, replace(broken, image_refused=True))) is Reason.IMAGE


def test_memory_may_run_out_twice_and_then_the_job_says_what_was_tried() -> None:
    job = build.active_job()
    for times in (1, 2):
        after = after_attempt(job, build.attempt(), Reason.OOM, "", build.T0)
        assert after.state is JobState.RECOVERING
        assert after.remedy is not None
        assert len(after.remedy.tried) == times
        job = replace(after, state=JobState.ACTIVE)
    failed = after_attempt(job, build.attempt(), Reason.OOM, "exit code 71", build.T0)
    assert failed.state is JobState.FAILED
    assert failed.reason.count("l40s (48.0 GiB)") == 3
    assert failed.reason.startswith("memory ran out 3 times")
    assert "\n" not in failed.reason


def test_a_job_that_is_not_to_be_retried_fails_at_once() -> None:
    job = build.active_job(spec_changes={"retry": {"on": ["preempted"]}})
    after = after_attempt(job, build.attempt(), Reason.OOM, "", build.T0)
    assert (after.state, after.remedy) == (JobState.FAILED, None)
    assert after.reason.startswith("memory ran out once: l40s (48.0 GiB)")


def test_a_cap_raised_while_draining_resumes_the_job() -> None:
    attempt = build.attempt(reserved_usd=Decimal(1), charged_usd=Decimal("0.9"), signal=Signal.CAP)
    raised = build.active_job(cap_usd=Decimal(2), spent_usd=Decimal("0.9"))
    assert after_attempt(raised, attempt, Reason.CAPPED, "", build.T0).state is JobState.RECOVERING
    same = build.active_job(cap_usd=Decimal(1), spent_usd=Decimal("0.9"))
    assert after_attempt(same, attempt, Reason.CAPPED, "", build.T0).state is JobState.CAPPED


def test_back_off_doubles_up_to_five_minutes() -> None:
    waits = [back_off_s(Reason.PREEMPTED, used) for used in range(30)]
    assert waits[:4] == [1, 2, 4, 8]
    assert waits == sorted(waits)
    assert waits[-1] == 300


KEEP = {"keep_on_failure": 900}


@pytest.mark.parametrize("outcome", Outcome)
def test_the_machine_of_a_failed_job_is_kept_as_long_as_was_asked_for(outcome: Outcome) -> None:
    attempt = ending(terminating_since=build.at(10), final=final(outcome))
    failed = outcome in (Outcome.USER_ERROR, Outcome.DATA, Outcome.OOM, Outcome.INFRASTRUCTURE)
    assert kept_until(attempt, build.active_job(spec_changes=KEEP)) == (build.at(910) if failed else None)
    assert kept_until(attempt, build.active_job()) is None


def test_neither_a_stop_nor_the_cap_waits_for_a_kept_machine() -> None:
    attempt = ending(terminating_since=build.at(10), final=final(Outcome.OOM))
    assert kept_until(attempt, build.active_job(spec_changes=KEEP, stop_requested=True)) is None
    assert kept_until(replace(attempt, signal=Signal.CAP), build.active_job(spec_changes=KEEP)) is None
    assert kept_until(replace(attempt, final=None), build.active_job(spec_changes=KEEP)) is None


def test_an_expired_quote_is_made_again_at_once() -> None:
    assert back_off_s(Reason.QUOTE_EXPIRED, 3) == 0


def test_a_job_drained_for_a_budget_goes_back_to_the_queue_for_nothing() -> None:
    attempt = ending(signal=Signal.BUDGET)
    assert end_reason(attempt, build.active_job()) is Reason.BUDGET
    job = build.active_job(retries_used=build.active_job().spec.retry.max)
    after = after_attempt(job, attempt, Reason.BUDGET, "budget used up", build.T0)
    assert (after.state, after.retries_used, after.due_at) == (JobState.RECOVERING, job.retries_used, build.T0)


@pytest.mark.parametrize("signal", [Signal.BUDGET, Signal.HUNG])
def test_a_fault_of_the_job_is_not_run_again_since_a_signal_came_as_well(signal: Signal) -> None:
    """A budget may drain while the machine of a failed job is kept, and each new attempt would fail like this one."""
    for outcome, reason in ((Outcome.USER_ERROR, Reason.USER_ERROR), (Outcome.DATA, Reason.DATA)):
        attempt = ending(signal=signal, final=final(outcome))
        assert end_reason(attempt, build.active_job()) is reason
        assert after_attempt(build.active_job(), attempt, reason, "", build.T0).state is JobState.FAILED
    assert end_reason(ending(signal=signal, final=final(Outcome.OOM)), build.active_job()) is Reason.OOM
    capped = ending(signal=Signal.CAP, final=final(Outcome.USER_ERROR))
    assert end_reason(capped, build.active_job()) is Reason.CAPPED
