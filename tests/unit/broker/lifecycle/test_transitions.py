"""Ends of attempts, and their consequences for the job."""

from dataclasses import replace
from decimal import Decimal

import pytest

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState, Handle, JobState, Reason, Signal
from broker.lifecycle.state_machine import AttemptEvent, Effect, JobEvent
from broker.lifecycle.transitions import (
    MAX_PREEMPTIONS_WITHOUT_PROGRESS,
    after_attempt,
    back_off_s,
    cap_was_raised,
    due_in_s,
    end_reason,
    inspection_end,
    job_event,
    reason_of,
    setup_reason,
    step,
)
from tests.support import build
from trainer.contract.documents import CheckpointRef, Final, Heartbeat, Outcome


def final(outcome: Outcome) -> Final:
    return Final(attempt="x", outcome=outcome)


def ending(**changes: object) -> build.Attempt:
    return build.attempt(AttemptState.TERMINATING, **changes)


def test_completed_outranks_every_other_outcome() -> None:
    attempt = ending(reason=Reason.STOPPED, signal=Signal.CAP, final=final(Outcome.COMPLETED))
    assert end_reason(attempt, build.active_job(stop_requested=True)) is Reason.COMPLETED


def test_a_user_stop_outranks_the_cap_and_the_cap_a_user_error() -> None:
    capped = ending(signal=Signal.CAP, final=final(Outcome.USER_ERROR))
    assert end_reason(capped, build.active_job(stop_requested=True)) is Reason.STOPPED
    assert end_reason(capped, build.active_job()) is Reason.CAPPED
    assert end_reason(ending(reason=Reason.STOPPED), build.active_job()) is Reason.STOPPED


def test_a_user_error_outranks_a_retry_and_no_cause_is_infrastructure() -> None:
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
def test_each_attempt_end_gives_its_job_state(reason: Reason, state: JobState) -> None:
    after = after_attempt(build.active_job(), build.attempt(), reason, "", build.at(1))
    assert after.state is state
    assert (after.finished_at is None) == (state is JobState.RECOVERING)


def test_retries_are_counted_and_run_out() -> None:
    job = build.active_job(spec_changes={"retry": {"max": 1}})
    once = after_attempt(job, build.attempt(), Reason.LOST, "", build.T0)
    assert (once.state, once.retries_used) == (JobState.RECOVERING, 1)
    job = build.active_job(spec_changes={"retry": {"max": 1}}, retries_used=1)
    assert after_attempt(job, build.attempt(), Reason.LOST, "", build.T0).state is JobState.FAILED


def saved(step: int, *, resumed_at: int | None = None) -> build.Attempt:
    """Return an attempt that resumed from a checkpoint of step `resumed_at` and then saved one of step `step`."""
    checkpoint = CheckpointRef(manifest="m", step=step)
    before = () if resumed_at is None else (f"jobs/j/a1/checkpoints/{resumed_at:08d}-a/manifest.json",)
    return build.attempt(resume_from=before, beat=Heartbeat(attempt="x", boot="b", seq=1, checkpoint=checkpoint))


def test_a_preemption_after_progress_costs_no_retry_however_often() -> None:
    job = build.active_job(spec_changes={"retry": {"max": 0}})
    for n in range(100):
        attempt = saved(n + 1, resumed_at=n) if n else saved(1)
        job = after_attempt(replace(job, state=JobState.ACTIVE), attempt, Reason.PREEMPTED, "", build.T0)
        assert (job.state, job.retries_used, job.preemptions_without_progress) == (JobState.RECOVERING, 0, 0)
        assert job.due_at == build.at(1)


@pytest.mark.parametrize("attempt", [build.attempt(), saved(7, resumed_at=7)], ids=["no checkpoint", "the old one"])
def test_preemptions_without_progress_end_a_job(attempt: build.Attempt) -> None:
    """Attempts that save nothing new are counted in a row; a job fails at the bound and says how to mend it."""
    job, waits = build.active_job(spec_changes={"retry": {"max": 0}}), []
    while job.state is JobState.ACTIVE:
        job = after_attempt(job, attempt, Reason.PREEMPTED, "gone", build.T0)
        if job.state is JobState.RECOVERING:
            waits.append((job.due_at - build.T0).total_seconds())
            job = replace(job, state=JobState.ACTIVE)
    assert (job.state, job.retries_used, len(waits)) == (JobState.FAILED, 0, MAX_PREEMPTIONS_WITHOUT_PROGRESS - 1)
    assert job.reason.startswith(f"preempted {MAX_PREEMPTIONS_WITHOUT_PROGRESS} times in a row")
    assert waits == [min(300.0, 2.0**n) for n in range(len(waits))]


def test_only_a_new_checkpoint_starts_the_count_of_preemptions_again() -> None:
    job = build.active_job(preemptions_without_progress=5)
    lost = after_attempt(job, build.attempt(), Reason.LOST, "", build.T0)
    assert (lost.preemptions_without_progress, lost.retries_used) == (5, 1)
    final = Final(attempt="x", outcome=Outcome.DRAINED, checkpoint=CheckpointRef(manifest="m", step=1))
    assert after_attempt(job, ending(final=final), Reason.PREEMPTED, "", build.T0).preemptions_without_progress == 0


@pytest.mark.parametrize("reason", [Reason.DEADMAN, Reason.NO_CAPACITY, Reason.QUOTE_EXPIRED])
def test_an_end_without_a_fault_costs_no_retry(reason: Reason) -> None:
    job = build.active_job(spec_changes={"retry": {"max": 0}})
    after = after_attempt(job, build.attempt(), reason, "", build.T0)
    assert (after.state, after.retries_used) == (JobState.RECOVERING, 0)


def test_causes_that_the_spec_excludes_are_not_retried() -> None:
    job = build.active_job(spec_changes={"retry": {"on": ["lost"]}})
    assert after_attempt(job, build.attempt(), Reason.PREEMPTED, "", build.T0).state is JobState.FAILED


def test_image_refused_once_is_retried_and_twice_ends_the_job() -> None:
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
        assert len(after.remedy.failed_plans) == times
        job = replace(after, state=JobState.ACTIVE)
    failed = after_attempt(job, build.attempt(), Reason.OOM, "exit code 71", build.T0)
    assert failed.state is JobState.FAILED
    assert failed.reason.count("l40s (48.0 GiB)") == 3
    assert failed.reason.startswith("memory ran out 3 times")
    assert "\n" not in failed.reason


def test_a_job_that_fails_says_whose_memory_ran_out_last() -> None:
    for ran_out, what in (("host", "l40s (64.0 GiB of the machine)"), ("device", "l40s (48.0 GiB)")):
        last = Final(attempt="x", outcome=Outcome.OOM, ran_out=ran_out)
        none_left = build.active_job(spec_changes={"retry": {"max": 0}})
        failed = after_attempt(none_left, build.attempt(final=last), Reason.OOM, "", build.T0)
        assert (failed.state, what in failed.reason) == (JobState.FAILED, True), failed.reason


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
    assert inspection_end(attempt, build.active_job(spec_changes=KEEP)) == (build.at(910) if failed else None)
    assert inspection_end(attempt, build.active_job()) is None


def test_neither_a_stop_nor_the_cap_waits_for_a_kept_machine() -> None:
    attempt = ending(terminating_since=build.at(10), final=final(Outcome.OOM))
    assert inspection_end(attempt, build.active_job(spec_changes=KEEP, stop_requested=True)) is None
    assert inspection_end(replace(attempt, signal=Signal.CAP), build.active_job(spec_changes=KEEP)) is None
    assert inspection_end(replace(attempt, final=None), build.active_job(spec_changes=KEEP)) is None


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


def test_the_time_of_a_jobs_machines_is_added_up_to_their_absence() -> None:
    attempt = ending(create_sent_at=build.at(10), absent_at=build.at(110))
    job = build.active_job(machine_s=7.0)
    assert after_attempt(job, attempt, Reason.LOST, "", build.at(500)).machine_s == 107.0
    still = replace(attempt, absent_at=None)
    assert after_attempt(job, still, Reason.LOST, "", build.at(500)).machine_s == 497.0


@pytest.mark.parametrize(
    ("reason", "used", "wait_s"),
    [
        (Reason.PREEMPTED, 0, 1), (Reason.PREEMPTED, 2, 1), (Reason.LOST, 0, 5), (Reason.LOST, 1, 10),
        (Reason.NO_CAPACITY, 0, 1), (Reason.NO_CAPACITY, 3, 4), (Reason.DEADMAN, 0, 5), (Reason.DEADMAN, 2, 10),
        (Reason.LOST, 5, 160), (Reason.LOST, 7, 300), (Reason.QUOTE_EXPIRED, 4, 0),
    ],
)  # fmt: skip
def test_back_off_grows_with_tries_and_depends_on_the_cause(reason: Reason, used: int, wait_s: float) -> None:
    job = build.active_job(spec_changes={"retry": {"max": 20}}, retries_used=used)
    assert after_attempt(job, build.attempt(), reason, "", build.at(1)).due_at == build.at(1 + wait_s)


@pytest.mark.parametrize("reason", [Reason.USER_ERROR, Reason.LOST])
def test_a_jobs_reason_is_its_attempts_message_or_outcome(reason: Reason) -> None:
    told = after_attempt(build.active_job(), build.attempt(), reason, "no such column", build.at(1))
    silent = after_attempt(build.active_job(), build.attempt(), reason, "", build.at(1))
    assert (told.reason, silent.reason) == ("no such column", reason.value)
    assert told.finished_at == (build.at(1) if reason is Reason.USER_ERROR else None)


def test_a_cap_that_was_not_used_up_states_why_the_job_continues() -> None:
    attempt = build.attempt(reserved_usd=Decimal(1), charged_usd=Decimal("0.9"), signal=Signal.CAP)
    raised = build.active_job(cap_usd=Decimal(2), spent_usd=Decimal("0.9"))
    after = after_attempt(raised, attempt, Reason.CAPPED, "", build.at(9))
    assert (after.reason, after.due_at, after.retries_used) == ("cap raised", build.at(9), 0)
    timed = build.active_job(cap_usd=Decimal(2), spent_usd=Decimal("0.9"), spec_changes={"max_duration": 3600})
    after = after_attempt(timed, attempt, Reason.CAPPED, "", build.at(9))
    assert after.reason == "the reservation of this attempt is used up"


def test_event_details_precede_rules_and_rules_precede_known_facts() -> None:
    """The details of an event take precedence over its rule, and the rule over earlier facts."""
    draining = build.attempt(AttemptState.DRAINING, reason=Reason.CAPPED)
    assert step(draining, AttemptEvent.FINAL, build.T0, reason=Reason.COMPLETED).attempt.reason is Reason.COMPLETED
    assert step(draining, AttemptEvent.FINAL, build.T0).attempt.reason is Reason.CAPPED
    training = build.attempt(AttemptState.TRAINING, reason=Reason.IDLE)
    moved = step(training, AttemptEvent.HUNG, build.T0)
    assert (moved.attempt.reason, moved.effects, moved.stale) == (Reason.HUNG, (Effect.DESTROY,), False)


def test_the_last_retry_for_an_image_is_the_last() -> None:
    one = {"retry": {"max": 1}}
    again = after_attempt(build.active_job(spec_changes=one), build.attempt(), Reason.IMAGE, "", build.T0)
    over = after_attempt(
        build.active_job(spec_changes=one, retries_used=1), build.attempt(), Reason.IMAGE, "", build.T0
    )
    assert (again.state, over.state) == (JobState.RECOVERING, JobState.FAILED)


def test_a_drain_ends_with_the_reason_for_which_it_began() -> None:
    assert end_reason(ending(reason=Reason.IDLE, final=final(Outcome.DRAINED)), build.active_job()) is Reason.IDLE


def test_an_image_that_no_earlier_attempt_was_refused_for_is_tried_again() -> None:
    assert job_event(build.active_job(), Reason.IMAGE) is JobEvent.RETRY


def test_spending_of_earlier_attempts_is_no_raised_cap() -> None:
    job = build.active_job(cap_usd=Decimal(2), spent_usd=Decimal("1.5"))
    assert not cap_was_raised(job, build.attempt(reserved_usd=Decimal("1.4"), charged_usd=Decimal("0.9")))
    assert cap_was_raised(job, build.attempt(reserved_usd=Decimal("1.3"), charged_usd=Decimal("0.9")))


@pytest.mark.parametrize(
    ("offer", "said", "host"),
    [
        ({}, {"ran_out": "host"}, True),
        ({"gpus": 2}, {"ran_out": "host"}, True),
        ({"gpus": 0}, {"ran_out": "host"}, False),
        ({"emulated_on": "cpu"}, {"ran_out": "host"}, False),
        ({}, {}, False),
    ],
)
def test_only_the_memory_of_a_machine_with_gpus_is_not_the_devices(
    offer: dict[str, object], said: dict[str, str], host: bool
) -> None:
    ended = Final(attempt="x", outcome=Outcome.OOM, **said)  # type: ignore[arg-type]
    attempt = ending(line=build.line(**offer), final=ended)
    assert attempt.ran_out_of_host is host
    after = after_attempt(build.active_job(), attempt, Reason.OOM, "", build.T0)
    assert after.remedy is not None
    assert (after.remedy.oom_host_bytes > 0) is host


def test_a_job_is_due_when_its_back_off_is_over() -> None:
    waits = after_attempt(build.active_job(), build.attempt(), Reason.INFRASTRUCTURE, "", build.at(1))
    assert waits.state is JobState.RECOVERING
    assert due_in_s(waits, build.at(1)) == 5.0
    assert due_in_s(waits, build.at(100)) == due_in_s(replace(waits, due_at=None), build.at(1)) == 0.0
