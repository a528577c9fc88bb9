"""Fences of what the guard and the retention controller write, and what the audit tells: the same in every store."""

from collections.abc import Collection

from broker.domain.errors import InUse, OriginDeleted
from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Forecast, Job, StoredKind
from broker.domain.money import LedgerCategory, LedgerEntry, LedgerKind
from broker.domain.tenancy import AuditEntry, Tenant
from broker.lifecycle.retention import last_checkpoint, origin_deleted_message
from broker.ports import Note, StorageCharge


def note_holds(note: Note, job: Job, attempt: Attempt) -> bool:
    """True when the attempt lives, and people were told neither more nor less since it was read."""
    read = note.attempt
    same = (attempt.live, attempt.idle, attempt.signal) == (True, read.idle, read.signal)
    same = same and job.attempts == note.job.attempts
    return same and _told(job.forecast) == _told(note.job.forecast)


def _told(forecast: Forecast | None) -> tuple[bool, bool]:
    return (False, False) if forecast is None else (forecast.over_cap, forecast.late)


def entry_of(charge: StorageCharge) -> LedgerEntry:
    return LedgerEntry(
        job_id=charge.job_id,
        attempt_id=None,
        kind=LedgerKind.CHARGE,
        usd=charge.usd,
        note=f"{charge.to.bytes} bytes stored",
        category=LedgerCategory.STORAGE,
    )


def check_rest(job: Job) -> None:
    """Raises InUse."""
    if job.state not in RESTING_JOB_STATES:
        raise InUse(f"job {job.id} is {job.state}; cancel it first, or wait for its end")


def still_needed(job: Job, by: JobId, team: str) -> InUse:
    """`by`: a job of `team`; another team's is not named."""
    who = f"job {by}" if team == job.team else "an operator's job"
    return InUse(f"{who} starts from the checkpoints of {job.id} and is not at rest; wait for its end, or cancel it")


def check_origin(origin: Job | None) -> None:
    """`origin`: what a new job starts from, as locked. Raises OriginDeleted."""
    if origin is not None and (when := origin.deleted.get(last_checkpoint(origin))) is not None:
        raise OriginDeleted(origin_deleted_message(origin.id, when))


def data_deleted(tenant: Tenant, job: Job, kinds: Collection[StoredKind]) -> AuditEntry:
    before = {"deleted": sorted(job.deleted)}
    after = {"deleted": sorted({*job.deleted, *kinds})}
    return tenant.audit_entry("job.delete_data", job.id, team=job.team, before=before, after=after)
