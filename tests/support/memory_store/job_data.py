"""Costs of a job in addition to its hours, in memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta

from broker.domain.ids import JobId
from broker.domain.job import TERMINAL_JOB_STATES, Event, Job, StoredKind
from broker.lifecycle.retention import RESUMED_FROM
from broker.ports import Note, StorageCharge
from broker.store.rules import fences
from broker.store.rules import job_data as cost_rules
from tests.support.memory_store.state import MemoryPart, State, shown, with_columns


class MemoryTenantJobData(MemoryPart):
    async def delete_data(self, job_id: JobId, kinds: Collection[StoredKind], event: Event) -> Job | None:
        state, row = self._state, self._visible(job_id)
        if row is None:
            return None
        cost_rules.check_rest(row.value)
        if RESUMED_FROM & set(kinds) and (by := _starts_from(state, job_id)):
            raise cost_rules.still_needed(row.value, by.id, by.team)
        new = set(kinds) - row.value.deleted.keys()
        if not new:
            return shown(row)
        state.write_audit(cost_rules.data_deleted(self._tenant, row.value, new))
        now = state.clock.now()
        row.value = replace(row.value, deleted={**dict.fromkeys(sorted(new), now), **row.value.deleted})
        row.stored_due_at = now
        state.write_events([event])
        return shown(row)


class MemoryGlobalJobData(MemoryPart):
    """Job data of all teams, for the controllers."""

    async def note(self, notes: Sequence[Note]) -> Sequence[bool]:
        return [self._note(note) for note in notes]

    def _note(self, note: Note) -> bool:
        job, attempt = self._state.jobs.get(note.job.id), self._state.attempts.get(note.attempt.id)
        if job is None or attempt is None or not cost_rules.note_holds(note, job.value, attempt.value):
            return False
        reason = job.value.reason if note.reason is None else fences.clean(note.reason)
        job.value = with_columns(job.value, forecast=note.forecast, reason=reason)
        stays = attempt.value.stays if note.stays is None else fences.clean(note.stays)
        attempt.value = with_columns(attempt.value, idle=note.idle, stays=stays)
        if note.signal is not None:
            self._state.signal(attempt, note.signal)
            self._state.hints.hint("jobs")
        self._state.write_events(note.events)
        return True

    async def claim_stored(self, *, lease_s: float, limit: int) -> Sequence[Job]:
        now = self._state.clock.now()
        due = [(row.stored_due_at, job_id) for job_id, row in self._state.jobs.items() if row.stored_due_at is not None]
        found = [self._state.jobs[job_id] for at, job_id in sorted(due) if at <= now][:limit]
        for row in found:
            row.stored_due_at = now + timedelta(seconds=lease_s)
        return [shown(row) for row in found]

    async def unfinished_dependent(self, job_id: JobId) -> JobId | None:
        by = _starts_from(self._state, job_id)
        return by.id if by else None

    async def charge_storage(self, charge: StorageCharge) -> bool:
        row = self._state.jobs.get(charge.job_id)
        if row is None or row.value.stored != charge.read:
            return False
        row.value = replace(row.value, stored=charge.to)
        after = None if charge.due_in_s is None else timedelta(seconds=charge.due_in_s)
        row.stored_due_at = None if after is None else self._state.clock.now() + after
        if charge.usd:
            self._state.write_ledger([cost_rules.entry_of(charge)])
        return True

    async def forget_uploads(self, *, older_than_s: float, limit: int) -> Sequence[str]:
        now = self._state.clock.now()
        latest: dict[str, float] = {}
        for own, upload in self._state.uploads.items():
            if upload.gone_at is None:
                age = (now - self._state.uploaded_at[own]).total_seconds()
                latest[upload.sha256] = min(age, latest.get(upload.sha256, age))
        gone = sorted(sha256 for sha256, age in latest.items() if age > older_than_s)[:limit]
        for own, upload in self._state.uploads.items():
            if upload.sha256 in gone and upload.gone_at is None:
                self._state.uploads[own] = replace(upload, gone_at=now)
        return gone

    async def known_uploads(self, hashes: Collection[str]) -> Collection[str]:
        return {
            upload.sha256
            for upload in self._state.uploads.values()
            if upload.sha256 in hashes and upload.gone_at is None
        }


def _starts_from(state: State, origin: JobId) -> Job | None:
    jobs = (row.value for row in state.jobs.values())
    return next((j for j in jobs if j.spec.origin == origin and j.state not in TERMINAL_JOB_STATES), None)
