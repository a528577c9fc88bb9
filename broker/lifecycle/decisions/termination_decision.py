"""Decides what becomes of a terminating attempt: keep its machine, destroy it, wait, or close its ledger.

`terminate` is pure. The rule names missing facts (`EndFactsNeeded`), so that the controller reads blob store and
database only if the decision depends on them. `after_destroy` decides once destroys were sent. `termination_events`
words the decisions.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from broker.billing.accrual import refused, traffic_owed, uncharged_usd
from broker.domain.job import Attempt, Event, Job, Reason
from broker.domain.money import ZERO, LedgerEntry, LedgerKind, format_usd
from broker.estimator.planning.corrections import observed
from broker.lifecycle.account_refusals import refused_in_a_row
from broker.lifecycle.decisions.launch_decision import all_handles
from broker.lifecycle.decisions.termination_facts import (
    EndFactsNeeded,
    EndReport,
    LastCharge,
    MissingEndFacts,
    OfferBlock,
    TerminationDecision,
    TerminationFacts,
    TerminationReport,
    TerminationStep,
)
from broker.lifecycle.host_reputation import judge_host, weight
from broker.lifecycle.liveness import TAKEN_AWAY, recorded_machines
from broker.lifecycle.recovery import adjustment_message
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import after_attempt, due_in_s, end_reason, inspection_end, step

STUCK_S = 120.0
"""Seconds after which an event reports what keeps an attempt from ending."""
RECHECK_S = 1.0
"""Seconds until an attempt that has not ended is due again: less than a round, so that another broker may claim it."""


def is_reported(times: int, first: int) -> bool:
    """Return True if a repeated failure is reported: after `first` failures, then at each doubling of their number."""
    doubled, rest = divmod(times, first)
    return rest == 0 and doubled & (doubled - 1) == 0


def terminate(facts: TerminationFacts) -> TerminationDecision | EndFactsNeeded:
    """Return the decision about a terminating attempt, or the facts that the decision still needs.

    The attempt ends only when the absence of its machines is proven. Its charges may end earlier; see `_charges_end`.
    """
    if facts.absence.proven_at is None:
        return _hold_for_inspection(facts) or _destroy(facts)
    absent = replace(facts.attempt, absent_at=_charges_end(facts, facts.absence.proven_at))
    if facts.is_report_unreadable:
        return _decision(facts, TerminationStep.WAIT, absent, due_in_s=facts.settings.look_s)
    if facts.report is None:
        return EndFactsNeeded(missing=MissingEndFacts.REPORT, facts=facts)
    return _close(facts, absent, facts.report)


def _hold_for_inspection(facts: TerminationFacts) -> TerminationDecision | None:
    """Keep a failed job's machine for inspection; None: no inspection, its time is over, or all machines have ended."""
    until = inspection_end(facts.attempt, facts.job)
    machines = recorded_machines(facts.attempt, facts.machines)
    has_ended = bool(machines) and all(machine.state in TAKEN_AWAY for machine in machines)
    if until is None or facts.now >= until or has_ended:
        return None
    wait_s = min(facts.settings.look_s, (until - facts.now).total_seconds())
    return _decision(facts, TerminationStep.KEEP, facts.attempt, due_in_s=wait_s)


def _charges_end(facts: TerminationFacts, proven_at: datetime) -> datetime:
    """Return the time up to which an attempt with absent machines is charged.

    An `absent_at` that is already recorded stays. The time is never before `charged_to`, because another broker may
    have charged up to it, and charges are final.
    """
    attempt = facts.attempt
    if attempt.absent_at is not None:
        return attempt.absent_at
    if refused(attempt) and attempt.create_sent_at is not None:
        proven_at = attempt.create_sent_at
    end = min(filter(None, (proven_at, facts.last_possible_end, facts.self_stopped_by)))
    return end if attempt.charged_to is None else max(end, attempt.charged_to)


# ----------------------------------------------------------------------------------------------------------- destroy


def _destroy(facts: TerminationFacts) -> TerminationDecision:
    """Destroy the machines of an attempt.

    A recorded `absent_at` stays until a listing shows a machine. If the cloud did not answer, the attempt is due at
    once, so that another broker, which may reach the cloud, can claim it.
    """
    attempt, handles = facts.attempt, all_handles(facts.attempt, facts.machines)
    if facts.exists:
        attempt = replace(attempt, absent_at=None, handles=attempt.handles or handles)
    return _decision(
        facts,
        TerminationStep.DESTROY,
        attempt,
        destroys=handles,
        stops_launcher=not facts.is_launcher_dead,
        due_in_s=min(RECHECK_S, facts.settings.look_s) if facts.is_listed else 0.0,
    )


def after_destroy(
    facts: TerminationFacts, decision: TerminationDecision, errors: Sequence[str], now: datetime
) -> TerminationDecision:
    """Return the decision DESTROY with the results of its destroys.

    `errors`: one line for each destroy that says why the cloud has not accepted the destroy; empty: no error so far.
    There is no back-off, since the machine bills; the provider gate limits the rate of calls.
    """
    message = next(filter(None, errors), "")
    if not message and _takes_long(facts, now):
        message = _obstacle_message(facts)
    if not message:
        return decision
    failed = step(decision.attempt, AttemptEvent.DESTROY_ERROR, now).attempt
    failed = replace(failed, destroy_failures=failed.destroy_failures + 1, detail=message)
    is_alert = is_reported(failed.destroy_failures, facts.settings.destroy_alert)
    report = TerminationReport.FAILED if is_alert else TerminationReport.NONE
    return replace(decision, attempt=failed, report=report)


def _takes_long(facts: TerminationFacts, now: datetime) -> bool:
    since = inspection_end(facts.attempt, facts.job) or facts.attempt.terminating_since or now
    return (now - since).total_seconds() > STUCK_S


def _obstacle_message(facts: TerminationFacts) -> str:
    """Return what the end of an attempt waits for, in one line; empty: nothing unusual."""
    attempt = facts.attempt
    name, provider = attempt.name, attempt.line.offer.provider
    if not facts.is_launcher_dead:
        return (
            f"launcher {attempt.launched_by!r} of {name} at {provider} cannot be proven dead, so a machine may "
            "still appear; end that launcher's process, or bring back its state folder; "
            f"if it is lost for good, confirm it: gpubroker launcher lost {attempt.id}"
        )
    if facts.error:
        return f"{name} cannot be proven gone, and is charged: {provider} cannot be listed: {facts.error}"
    if facts.exists:
        destroyed = f"{provider} has accepted the destroy of {name} and still lists it"
        return f"{destroyed}; if that lasts, end the machine in the cloud's console"
    return ""


# ------------------------------------------------------------------------------------------------------------- close


def _close(facts: TerminationFacts, absent: Attempt, report: EndReport) -> TerminationDecision | EndFactsNeeded:
    """Close the ledger of an attempt whose machines are absent, and block its host if the host is at fault."""
    image_refused = False
    blocks: tuple[OfferBlock, ...] = ()
    offer = absent.line.offer
    if facts.attempt.reason is Reason.IMAGE:
        if facts.earlier_attempts is None:
            return EndFactsNeeded(missing=MissingEndFacts.EARLIER_ATTEMPTS, facts=facts)
        # True if an earlier attempt ended because of its image too, and none has booted since. Otherwise the job tries
        # another host.
        image_refused = any(row.reason is Reason.IMAGE for row in refused_in_a_row(facts.earlier_attempts))
        blocks = (OfferBlock(key=offer.host_key, reason=absent.detail, for_s=facts.settings.sold_out_s),)
    absent = replace(absent, final=report.final, reason=report.drain_reason or absent.reason)
    decision = close_ledger(facts, absent, image_refused=image_refused)
    if facts.host_trust == "own" or not weight(decision.attempt):  # the user's own hosts have no reputation
        return replace(decision, blocks=blocks)
    if facts.host_record is None:
        return EndFactsNeeded(missing=MissingEndFacts.HOST_RECORD, facts=facts)
    if (block := judge_host((decision.attempt, *facts.host_record), facts.now)) is not None:
        blocks = (*blocks, OfferBlock(key=offer.host_key, reason=block.reason, for_s=block.for_s))
    return replace(decision, blocks=blocks)


def close_ledger(facts: TerminationFacts, absent: Attempt, *, image_refused: bool) -> TerminationDecision:
    """Return the last charge, the release of the reservation and the job's next state, as one decision."""
    job, now, until = facts.job, facts.now, absent.absent_at or facts.now
    reason = end_reason(absent, job)
    ended = step(absent, AttemptEvent.ABSENT, now, reason=reason).attempt
    priced = replace(absent, prices=(*absent.prices, *facts.prices))
    usd, traffic_usd = uncharged_usd(priced, until), traffic_owed(absent, until)
    spent = absent.charged_usd + usd + traffic_usd
    release = LedgerEntry(
        job_id=job.id,
        attempt_id=absent.id,
        kind=LedgerKind.RELEASE,
        usd=max(absent.reserved_usd - spent, ZERO),
        note=reason.value,
    )
    job_after = after_attempt(job, ended, reason, ended.detail, now, image_refused=image_refused)
    return _decision(
        facts,
        TerminationStep.CLOSE,
        ended,
        job_after=job_after,
        charge=LastCharge(until=until, usd=usd, traffic_usd=traffic_usd, prices=facts.prices),
        spent_usd=spent,
        ledger=(release,),
        observation=observed(job, ended),
        report=TerminationReport.ENDED,
        due_in_s=due_in_s(job_after, now),
    )


def _decision(facts: TerminationFacts, step: TerminationStep, attempt: Attempt, **parts: Any) -> TerminationDecision:
    return TerminationDecision(step=step, before=facts.attempt, attempt=attempt, job=facts.job, **parts)


# ------------------------------------------------------------------------------------------------------------- texts


def termination_events(decision: TerminationDecision) -> tuple[Event, ...]:
    """Return the events that report a decision."""
    job, job_after, attempt = decision.job, decision.job_after, decision.attempt
    if decision.report is TerminationReport.FAILED:
        message = f"{attempt.detail} ({attempt.destroy_failures} times)"
        return (Event(job_id=job.id, attempt_id=attempt.id, kind="attempt.destroy_failed", message=message),)
    if job_after is None:
        return ()
    reason = attempt.reason.value if attempt.reason else ""
    ended = Event(
        job_id=job.id,
        attempt_id=attempt.id,
        kind="attempt.ended",
        message=f"attempt {attempt.number} ended: {reason}, {format_usd(decision.spent_usd)}",
        data={"reason": reason, "usd": str(decision.spent_usd)},
    )
    why = f" ({job_after.reason})" if job_after.reason else ""
    message = f"job {job.spec.name}: {job_after.state.value}{why}"
    advanced = Event(job_id=job.id, kind=f"job.{job_after.state.value}", message=message)
    return (ended, *_replanned(job, job_after, attempt), advanced)


def _replanned(before: Job, after: Job, ended: Attempt) -> tuple[Event, ...]:
    """Return the event that reports a plan changed after memory ran out; empty: the plan is unchanged."""
    changed = after.remedy
    if changed is None or changed == before.remedy:
        return ()
    data = {
        "micro_batch": changed.micro_batch,
        "gradient_checkpointing": changed.gradient_checkpointing,
        "tried": list(changed.failed_plans),
    }
    message = adjustment_message(before, ended.line, changed)
    return (Event(job_id=before.id, kind="job.replanned", message=message, data=data),)
