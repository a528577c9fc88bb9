"""Applies events to attempts (`step`) and derives the next state of their jobs (`after_attempt`)."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from broker.billing.accrual import machine_s
from broker.domain.instance import Observed
from broker.domain.job import Attempt, AttemptState, Job, JobState, PlanAdjustment, Reason, Signal
from broker.lifecycle.account_refusals import refused_by_account
from broker.lifecycle.recovery import MAX_CHANGES, adjust_plan, given_up_message
from broker.lifecycle.signals import SIGNALS
from broker.lifecycle.state_machine import (
    AttemptEvent,
    Effect,
    ImpossibleEvent,
    JobEvent,
    TransitionVerdict,
    attempt_rule,
    next_job_state,
)
from trainer.contract.documents import Final, Outcome
from trainer.contract.object_keys import step_of

FREE_RETRIES = frozenset({Reason.DEADMAN, Reason.NO_CAPACITY, Reason.QUOTE_EXPIRED, Reason.BUDGET, Reason.MOVED})
"""End reasons that do not use up `retry.max`: no fault occurred and (almost) nothing was paid."""

MAX_PREEMPTIONS_WITHOUT_PROGRESS = 20
"""Preempted attempts in a row without a new checkpoint, after which a job fails. A preemption uses up no retry."""


@dataclass(frozen=True, kw_only=True)
class TransitionDecision:
    """The attempt after an event, with the effects of the transition; `stale`: nothing changes."""

    attempt: Attempt
    effects: tuple[Effect, ...] = ()
    stale: bool = False


def step(attempt: Attempt, event: AttemptEvent, now: datetime, *, reason: Reason | None = None) -> TransitionDecision:
    """Apply one event. Raises ImpossibleEvent.

    `reason`: end reason that an event such as FINAL itself carries.
    """
    rule = attempt_rule(attempt.state, event)
    if rule is TransitionVerdict.STALE:
        return TransitionDecision(attempt=attempt, stale=True)
    if isinstance(rule, TransitionVerdict):
        raise ImpossibleEvent(f"attempt {attempt.state.value}: {event.value}")
    moved = replace(attempt, state=rule.next, reason=reason or rule.reason or attempt.reason)
    if rule.next is AttemptState.PLANNED:  # the create was not sent: as before the launch
        moved = replace(moved, create_sent_at=None)
    elif rule.next is not attempt.state:
        moved = replace(moved, **{_ENTERED[rule.next]: now})  # type: ignore[arg-type]
    return TransitionDecision(attempt=moved, effects=rule.effects)


_ENTERED = {
    AttemptState.LAUNCHING: "create_sent_at",
    AttemptState.BOOTING: "booted_at",
    AttemptState.TRAINING: "first_beat_at",
    AttemptState.DRAINING: "draining_since",
    AttemptState.TERMINATING: "terminating_since",
    AttemptState.ENDED: "ended_at",
}
"""The field that records when a state was entered."""


_REASON_OF_OUTCOME = {
    Outcome.COMPLETED: Reason.COMPLETED,
    Outcome.USER_ERROR: Reason.USER_ERROR,
    Outcome.DATA: Reason.DATA,
    Outcome.OOM: Reason.OOM,
    Outcome.INFRASTRUCTURE: Reason.INFRASTRUCTURE,
    Outcome.DEADMAN: Reason.DEADMAN,
}


def reason_of(final: Final, drained_for: Reason | None) -> Reason:
    """Return the end reason that follows from a final report.

    After the outcome DRAINED it is `drained_for`. A machine that drained without a request was preempted.
    """
    if final.outcome is Outcome.DRAINED:
        return drained_for or Reason.PREEMPTED
    return _REASON_OF_OUTCOME[final.outcome]


_FAULTS = frozenset({Reason.USER_ERROR, Reason.DATA, Reason.OOM})
"""Faults of the job itself, which a retry would repeat."""
_RETRIED = frozenset({Signal.BUDGET, Signal.HUNG, Signal.MOVE})
"""Signals after which a job continues."""


def end_reason(attempt: Attempt, job: Job) -> Reason:
    """Return why an attempt ended, by priority: completed > user stop > cap > user error > retry."""
    reason = reason_of(attempt.final, attempt.reason) if attempt.final else attempt.reason
    if reason is Reason.COMPLETED:
        return Reason.COMPLETED
    if job.stop_requested or reason is Reason.STOPPED:
        return Reason.STOPPED
    if attempt.signal is not None and not (reason in _FAULTS and attempt.signal in _RETRIED):
        return SIGNALS[attempt.signal].reason
    return reason or Reason.INFRASTRUCTURE


_INSPECTABLE = frozenset({Outcome.USER_ERROR, Outcome.DATA, Outcome.OOM, Outcome.INFRASTRUCTURE})
"""Failures that an inspection of the machine may explain."""


def setup_reason(machines: tuple[Observed, ...]) -> Reason:
    """Return the end reason of an attempt whose machine will never run its agent."""
    return Reason.IMAGE if any(machine.image_refused for machine in machines) else Reason.INFRASTRUCTURE


def inspection_end(attempt: Attempt, job: Job) -> datetime | None:
    """Return the time until which a failed attempt's machine is kept (`keep_on_failure`); None: not kept.

    The machine bills, so a stop or a signal ends the wait.
    """
    failed = attempt.final is not None and attempt.final.outcome in _INSPECTABLE
    if not (failed and job.spec.keep_on_failure and attempt.terminating_since):
        return None
    if job.stop_requested or attempt.signal is not None:
        return None
    return attempt.terminating_since + timedelta(seconds=job.spec.keep_on_failure)


def job_event(job: Job, reason: Reason, *, image_refused: bool = False, free: bool = False) -> JobEvent:
    """Return the job event for the end of an attempt, by its retries and changes of plan.

    `image_refused`: an earlier attempt ended because of its image too. A registry that refuses an image to two machines
    refuses it to all. `free`: the attempt uses up no retry.
    """
    match reason:
        case Reason.COMPLETED:
            return JobEvent.COMPLETED
        case Reason.STOPPED:
            return JobEvent.STOPPED
        case Reason.CAPPED:
            return JobEvent.CAPPED
        case Reason.USER_ERROR | Reason.DATA:
            return JobEvent.FAILED
        case Reason.IMAGE:
            may_retry = not image_refused and job.retries_used < job.spec.retry.max
            return JobEvent.RETRY if may_retry else JobEvent.FAILED
        case Reason.QUOTE_EXPIRED | Reason.BUDGET | Reason.MOVED:
            return JobEvent.RETRY
        case _:
            return JobEvent.RETRY if _may_retry(job, reason, free) else JobEvent.FAILED


def _may_retry(job: Job, reason: Reason, free: bool) -> bool:
    if reason.value not in job.spec.retry.on:
        return False
    if reason is Reason.OOM and job.remedy is not None and len(job.remedy.failed_plans) >= MAX_CHANGES:
        return False
    if reason is Reason.PREEMPTED:
        return job.preemptions_without_progress < MAX_PREEMPTIONS_WITHOUT_PROGRESS
    return free or reason in FREE_RETRIES or job.retries_used < job.spec.retry.max


def back_off_s(reason: Reason, used: int) -> float:
    """Return seconds before the next quote, doubling up to five minutes.

    0 after an expired quote, because nothing was bought. 0 after a drain for a budget, because the policy delays the
    job. 0 after a move, because the next offer is on sale.
    """
    if reason in (Reason.QUOTE_EXPIRED, Reason.BUDGET, Reason.MOVED):
        return 0.0
    base = 1.0 if reason in (Reason.PREEMPTED, Reason.NO_CAPACITY) else 5.0
    return min(300.0, base * 2.0 ** min(used, 16))


def due_in_s(job: Job, now: datetime) -> float:
    """Return seconds until a job that `after_attempt` has decided on is due."""
    return max(0.0, (job.due_at - now).total_seconds()) if job.due_at else 0.0


def _remedy(job: Job, attempt: Attempt) -> PlanAdjustment:
    return adjust_plan(job, attempt.line, host=attempt.ran_out_of_host)


def cap_was_raised(job: Job, attempt: Attempt) -> bool:
    """Return True if more of the cap is left than the attempt reserved.

    Either the cap was raised, or `max_duration` limited the reservation.
    """
    return job.cap_usd - (job.spent_usd - attempt.charged_usd) > attempt.reserved_usd


def made_progress(attempt: Attempt) -> bool:
    """Return True if the attempt saved a checkpoint of a later step than the one that it resumed from."""
    reports = (attempt.final, attempt.beat)
    saved = max((report.checkpoint.step for report in reports if report and report.checkpoint), default=0)
    return saved > (step_of(attempt.resume_from[0]) if attempt.resume_from else 0)


def _preemptions_without_progress(job: Job, attempt: Attempt, reason: Reason) -> int:
    """Return the job's count after an attempt: 0 after a new checkpoint, otherwise one more after a preemption."""
    if made_progress(attempt):
        return 0
    return job.preemptions_without_progress + (reason is Reason.PREEMPTED)


def _failure_message(job: Job, attempt: Attempt, reason: Reason, detail: str) -> str:
    """Return the reason with which a job ends after its last attempt."""
    if reason is Reason.OOM:
        return given_up_message(job, attempt.line, host=attempt.ran_out_of_host)
    if reason is Reason.PREEMPTED and job.preemptions_without_progress >= MAX_PREEMPTIONS_WITHOUT_PROGRESS:
        count = job.preemptions_without_progress
        fix = "set resources.spot: never or a lower checkpoint.every_s"
        return f"preempted {count} times in a row before a checkpoint was saved; {fix}"
    return detail


def after_attempt(
    job: Job, attempt: Attempt, reason: Reason, detail: str, now: datetime, *, image_refused: bool = False
) -> Job:
    """Return the job after its attempt has ended for `reason`.

    `job`: as read with the attempt, before the last charge.
    """
    free = reason in FREE_RETRIES or reason is Reason.PREEMPTED or refused_by_account(attempt)
    job = replace(job, preemptions_without_progress=_preemptions_without_progress(job, attempt, reason))
    event = job_event(job, reason, image_refused=image_refused, free=free)
    job = replace(job, machine_s=job.machine_s + machine_s(attempt, attempt.absent_at or now))
    if event is JobEvent.CAPPED and cap_was_raised(job, attempt):
        why = "cap raised" if job.spec.max_duration is None else "the reservation of this attempt is used up"
        return replace(job, state=next_job_state(job.state, JobEvent.RETRY), reason=why, due_at=now)
    state = next_job_state(job.state, event)
    if state is not JobState.RECOVERING:
        why = _failure_message(job, attempt, reason, detail)
        return replace(job, state=state, reason=why or reason.value, finished_at=now)
    used = job.retries_used + (not free)
    repeats = job.preemptions_without_progress if reason is Reason.PREEMPTED else used
    return replace(
        job,
        state=state,
        reason=detail or reason.value,
        retries_used=used,
        remedy=_remedy(job, attempt) if reason is Reason.OOM else job.remedy,
        due_at=now + timedelta(seconds=back_off_s(reason, max(repeats - 1, 0))),
    )
