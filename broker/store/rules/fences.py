"""Fences: checks of a change against the locked rows, shared by all stores.

The schema's CHECKs repeat `broken_job_rule` and `broken_attempt_rule`, so that they also bind other writers.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol

from broker.domain.errors import IdempotencyConflict, InUse, StoreError
from broker.domain.ids import AttemptId, JobId
from broker.domain.job import TERMINAL_JOB_STATES, Attempt, AttemptState, Job, JobState
from broker.domain.money import LedgerCategory, LedgerEntry
from broker.domain.tenancy import AuditEntry, Tenant
from broker.ports import Change, Charge, Lane, Token, Upload

WAITING_JOB_STATES = frozenset({JobState.AWAITING_APPROVAL, JobState.QUEUED, JobState.RECOVERING})
"""States in which a stop request makes the job itself claimable. In other states an attempt handles the stop, or the
job has ended."""

_AFTER_CREATE = frozenset(AttemptState) - {AttemptState.PLANNED, AttemptState.ENDED}
_LEAVING = frozenset({AttemptState.DRAINING, AttemptState.TERMINATING, AttemptState.ENDED})


def place_in_queue(job: Job) -> tuple[int, datetime, JobId]:
    """Return the sort key of a job: higher priorities first, older jobs first among equals."""
    return -job.spec.priority, job.created_at, job.id


class JobNow(Protocol):
    """Fields of a job's locked row; `Job` has them too."""

    @property
    def epoch(self) -> int: ...
    @property
    def state(self) -> JobState: ...
    @property
    def attempts(self) -> int: ...
    @property
    def cap_usd(self) -> Decimal: ...
    @property
    def stop_requested(self) -> bool: ...


class AttemptNow(Protocol):
    """Fields of an attempt's locked row; `Attempt` has them too."""

    @property
    def epoch(self) -> int: ...
    @property
    def state(self) -> AttemptState: ...
    @property
    def charged_to(self) -> datetime | None: ...


def lane_of(state: AttemptState, signal: bool) -> Lane | None:
    """Return the lane of an attempt; None: it has ended. `signal`: it has a signal, or its job has a stop request."""
    if state in (AttemptState.PLANNED, AttemptState.LAUNCHING):
        return Lane.LAUNCH
    if state in (AttemptState.BOOTING, AttemptState.TRAINING):
        return Lane.INTERRUPTION if signal else Lane.LIVENESS
    if state is AttemptState.DRAINING:
        return Lane.INTERRUPTION
    return Lane.TERMINATION if state is AttemptState.TERMINATING else None


def charge_holds(charge: Charge, attempts: Mapping[AttemptId, AttemptNow]) -> bool:
    """Return True if the attempt is still charged up to `since`."""
    row = attempts.get(charge.attempt_id)
    return row is not None and row.charged_to == charge.since


def entries_of(charge: Charge) -> tuple[LedgerEntry, ...]:
    """Return the ledger entries of a charge: one for each category with dollars."""
    parts = ((charge.usd, LedgerCategory.COMPUTE), (charge.traffic_usd, LedgerCategory.EGRESS))
    return tuple(
        LedgerEntry(
            job_id=charge.job_id,
            attempt_id=charge.attempt_id,
            kind=charge.kind,
            usd=usd,
            note=charge.note,
            category=category,
        )
        for usd, category in parts
        if usd
    )


def all_hold(change: Change, jobs: Mapping[JobId, JobNow], attempts: Mapping[AttemptId, AttemptNow]) -> bool:
    """Return True if every fence of `change` holds against the locked rows."""
    if not jobs_written(change) <= jobs.keys():
        return False
    if change.attempt is not None:
        read, row = change.attempt[0], attempts.get(change.attempt[0].id)
        if row is None or (row.epoch, row.state) != (read.epoch, read.state):
            return False
    if change.job is not None and not _job_holds(change, change.job[0], jobs):
        return False
    return change.charge is None or charge_holds(change.charge, attempts)


def _job_holds(change: Change, read: Job, jobs: Mapping[JobId, JobNow]) -> bool:
    row = jobs.get(read.id)
    if row is None or row.state is not read.state:
        return False
    # Admission and the state capped were decided by the cap as read; a user may have raised the cap meanwhile.
    by_cap = change.admit is not None or (change.job is not None and change.job[1].state is JobState.CAPPED)
    if by_cap and row.cap_usd != read.cap_usd:
        return False
    # A capped job waits for a user, so a stop that came meanwhile would never take effect.
    if change.job is not None and change.job[1].state is JobState.CAPPED and row.stop_requested != read.stop_requested:
        return False
    # An active job is leased through its attempt; the number shows that this attempt is still the current one.
    with_attempt = change.attempt is not None or change.admit is not None
    if with_attempt and read.state is JobState.ACTIVE:
        return row.attempts == read.attempts
    return row.epoch == read.epoch


def jobs_written(change: Change) -> set[JobId]:
    """Return the jobs whose rows `change` locks, because their state, money or event counter changes."""
    ids = {event.job_id for event in change.events}
    if change.job is not None:
        ids.add(change.job[0].id)
    if change.admit is not None:
        ids.add(change.admit.job_id)
    if change.charge is not None:
        ids.add(change.charge.job_id)
    return ids


def attempts_written(change: Change) -> set[AttemptId]:
    """Return the attempts whose rows `change` locks; an admitted attempt has no row yet."""
    ids = {change.attempt[0].id} if change.attempt is not None else set()
    return ids | ({change.charge.attempt_id} if change.charge is not None else set())


def broken_attempt_rule(attempt: Attempt) -> str | None:
    """Return the schema rule that `attempt` breaks; None: it breaks none."""
    if attempt.state in _AFTER_CREATE and attempt.create_sent_at is None:
        return "attempts_create_sent"
    if (attempt.state is AttemptState.ENDED) != (attempt.ended_at is not None):
        return "attempts_ended"
    if attempt.state in _LEAVING and attempt.reason is None:
        return "attempts_reason"
    if attempt.number < 1 or attempt.destroy_failures < 0:
        return "attempts_counts"
    return None if _sound(attempt.reserved_usd) and _sound(attempt.charged_usd) else "attempts_money"


def _sound(usd: Decimal) -> bool:
    """Return True for a finite amount that is not negative."""
    return usd.is_finite() and usd >= 0


def broken_job_rule(job: Job) -> str | None:
    """Return the schema rule that `job` breaks; None: it breaks none."""
    if job.state in TERMINAL_JOB_STATES and job.finished_at is None:
        return "jobs_finished"
    if job.state is JobState.ACTIVE and job.attempts < 1:
        return "jobs_active"
    if min(job.attempts, job.retries_used) < 0:
        return "jobs_counts"
    if job.preemptions_without_progress < 0:
        return "jobs_preemptions"
    return None if _sound(job.cap_usd) and job.cap_usd > 0 and _sound(job.spent_usd) else "jobs_money"


def broken_ledger_rule(entries: Sequence[LedgerEntry]) -> str | None:
    """Return the schema rule that one of `entries` breaks; None: they break none."""
    return None if all(_sound(entry.usd) for entry in entries) else "ledger_money"


def check(change: Change) -> None:
    """Raise StoreError for a change that the schema would refuse for any rows."""
    for attempt in (change.attempt[1] if change.attempt else None, change.admit):
        if attempt is not None and (rule := broken_attempt_rule(attempt)):
            raise refused(f"attempt {attempt.id} as {attempt.state}", rule)
    if change.job is not None and (rule := broken_job_rule(change.job[1])):
        raise refused(f"job {change.job[1].id} as {change.job[1].state}", rule)
    if rule := broken_ledger_rule(change.ledger):
        raise refused(f"ledger of job {change.ledger[0].job_id}", rule)
    if change.charge is not None and not (_sound(change.charge.usd) and _sound(change.charge.traffic_usd)):
        raise refused(f"charge of attempt {change.charge.attempt_id}", "ledger_money")


def wakes(change: Change) -> bool:
    """Return True if `change` leaves something that a controller may take up at once."""
    if change.admit is not None or (change.charge is not None and change.charge.signal is not None):
        return True
    if change.job is not None and change.job[1].state in WAITING_JOB_STATES:
        return True
    return change.attempt is not None and change.attempt[1].live and change.due_in_s <= 0


def cannot_run_again(job: Job) -> bool:
    """Return True for a capped job whose own copy of its input was deleted: a new machine would have no input."""
    return job.state is JobState.CAPPED and "data" in job.deleted


def refused(what: str, rule: str) -> StoreError:
    """Return the error for a row that the schema refuses, which is a programming error of the writer."""
    return StoreError(f"{what}: the rule {rule} of the schema refuses it; nothing of this step was written")


def key_conflict(key: str) -> IdempotencyConflict:
    """Return the error for one idempotency key with two bodies."""
    return IdempotencyConflict(f"idempotency key {key!r} was used with another body: send the same body, or a new key")


def clean(text: str) -> str:
    """Return `text` in a form that PostgreSQL can store: NUL becomes U+FFFD, and a lone surrogate becomes `?`."""
    if text.isprintable():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


# Audit entries of writes.


def submitted(tenant: Tenant, job: Job) -> AuditEntry:
    after = {"name": job.spec.name, "cap_usd": job.cap_usd, "retry_of": job.retry_of}
    action = "job.retry" if job.retry_of else "job.submit"
    return tenant.audit_entry(action, job.id, team=job.team, after=after, usd=job.cap_usd)


def stopped(tenant: Tenant, job: Job) -> AuditEntry:
    return tenant.audit_entry("job.stop", job.id, team=job.team, before={"state": job.state.value})


def cap_raised(tenant: Tenant, job: Job, cap_usd: Decimal) -> AuditEntry:
    """Return the audit entry of a raised cap; its dollars are the increase."""
    before, after = {"cap_usd": job.cap_usd}, {"cap_usd": cap_usd}
    return tenant.audit_entry(
        "job.raise_cap", job.id, team=job.team, before=before, after=after, usd=cap_usd - job.cap_usd
    )


def approved(tenant: Tenant, job: Job, up_to_usd: Decimal) -> AuditEntry:
    before = {"state": job.state.value, "approved_usd": job.approved_usd}
    return tenant.audit_entry(
        "job.approve", job.id, team=job.team, before=before, after={"approved_usd": up_to_usd}, usd=up_to_usd
    )


def uploaded(tenant: Tenant, upload: Upload) -> AuditEntry:
    return tenant.audit_entry("upload.put", upload.sha256, after={"name": upload.name, "bytes": upload.bytes})


def token_made(tenant: Tenant, token: Token) -> AuditEntry:
    return tenant.audit_entry("token.create", token.id, team=token.team, after=_rights(token))


def token_revoked(tenant: Tenant, token: Token) -> AuditEntry:
    return tenant.audit_entry("token.delete", token.id, team=token.team, before=_rights(token))


def _rights(token: Token) -> dict[str, Any]:
    until = token.expires_at.isoformat() if token.expires_at else None
    return {"owner": token.owner, "scopes": list(token.scopes), "expires_at": until}


def team_in_use(name: str) -> InUse:
    return InUse(f"team {name} has jobs, which its ledger needs: revoke its tokens instead")
