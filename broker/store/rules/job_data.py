"""Fences and audit entries of the writes of spend guard and retention controller, shared by all stores."""

from collections.abc import Collection

from broker.domain.errors import InUse, OriginDeleted
from broker.domain.ids import JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Forecast, Job, StoredKind
from broker.domain.money import LedgerCategory, LedgerEntry, LedgerKind
from broker.domain.tenancy import AuditEntry, Tenant
from broker.lifecycle.retention import last_checkpoint, origin_deleted_message
from broker.ports import Note, StorageCharge


def note_holds(note: Note, job: Job, attempt: Attempt) -> bool:
    """Return True if the attempt is live and current, and no warning was reported since it was read."""
    read = note.attempt
    same = (attempt.live, attempt.idle, attempt.signal) == (True, read.idle, read.signal)
    same = same and job.attempts == note.job.attempts and (note.stays is None or attempt.stays == read.stays)
    return same and _reported_warnings(job.forecast) == _reported_warnings(note.job.forecast)


def _reported_warnings(forecast: Forecast | None) -> tuple[bool, bool, int]:
    """Return the reported warnings, and the attempt of the reported interval; 0: none."""
    if forecast is None:
        return False, False, 0
    return forecast.over_cap, forecast.late, forecast.interval.attempt if forecast.interval else 0


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
    """Raise InUse unless the job has ended."""
    if job.state not in RESTING_JOB_STATES:
        raise InUse(f"job {job.id} is {job.state}; cancel it first, or wait for its end")


def still_needed(job: Job, by: JobId, team: str) -> InUse:
    """Return the error for checkpoints that job `by` of `team` starts from; another team's job is not named."""
    holder = f"job {by}" if team == job.team else "an operator's job"
    return InUse(f"{holder} starts from the checkpoints of {job.id} and has not ended; wait for its end, or cancel it")


def check_origin(origin: Job | None) -> None:
    """Raise OriginDeleted if the checkpoints of `origin`, the locked job that a new job starts from, were deleted."""
    if origin is not None and (when := origin.deleted.get(last_checkpoint(origin))) is not None:
        raise OriginDeleted(origin_deleted_message(origin.id, when))


def data_deleted(tenant: Tenant, job: Job, kinds: Collection[StoredKind]) -> AuditEntry:
    before = {"deleted": sorted(job.deleted)}
    after = {"deleted": sorted({*job.deleted, *kinds})}
    return tenant.audit_entry("job.delete_data", job.id, team=job.team, before=before, after=after)
