"""Stored data, forecasts and storage charges of jobs on PostgreSQL."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from broker.domain.errors import StoreError, StoreUnavailable
from broker.domain.ids import JobId
from broker.domain.job import Event, Job, StoredKind
from broker.lifecycle.retention import RESUMED_FROM
from broker.ports import Note, StorageCharge
from broker.store.postgres import row_codec
from broker.store.postgres.apply import notify, send_events
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.pool import QUERIES, Pool, columns
from broker.store.rules import fences, job_data

NOTES = 50
"""Maximum number of notes of one transaction."""


class PostgresTenantJobData(PostgresPart):
    _all_teams_pool: Pool

    async def delete_data(self, job_id: JobId, kinds: Collection[StoredKind], event: Event) -> Job | None:
        if not await self._pool.read("job", job_id):
            return None
        # The submission of a job that starts from this job locks the row too. That job may be of another team, which
        # the tenant's own pool does not show.
        async with self._all_teams_pool.transaction("delete_data") as connection:
            row = await connection.fetchrow(QUERIES["lock_job"], job_id)
            if row is None:
                return None
            job = row_codec.job(row)
            job_data.check_rest(job)
            if RESUMED_FROM & set(kinds) and (by := await connection.fetch(QUERIES["starts_from"], job_id)):
                raise job_data.still_needed(job, JobId(by[0]["id"]), by[0]["team"])
            new_kinds = sorted(set(kinds) - job.deleted.keys())
            if not new_kinds:
                return job
            (row,) = await connection.fetch(QUERIES["delete_data"], job_id, new_kinds)
            await self._write_event(connection, event, row)
            await write_audit(connection, [job_data.data_deleted(self._tenant, job, new_kinds)])
            return row_codec.job(row)


class PostgresGlobalJobData(PostgresPart):
    """The part of job data that the controllers use."""

    async def note(self, notes: Sequence[Note]) -> Sequence[bool]:
        """Write the notes in batches. If a batch is refused, each of its notes is written alone."""
        applied: list[bool] = []
        errors: list[StoreError] = []
        for batch in _batches(notes):
            try:
                applied += await self._note(batch)
            except StoreUnavailable:
                raise
            except StoreError as error:
                for note in batch if len(batch) > 1 else ():
                    try:
                        await self.note([note])
                    except StoreUnavailable:
                        raise
                    except StoreError as own:
                        errors.append(own)
                if len(batch) == 1:
                    errors.append(error)
        if errors:
            raise errors[0]
        return applied

    async def _note(self, notes: Sequence[Note]) -> list[bool]:
        """Write notes of different jobs in one transaction.

        Jobs are locked before attempts, each in the order of their ids, as by all other writers.
        """
        async with self._pool.transaction("note") as connection:
            job_ids, attempt_ids = sorted(n.job.id for n in notes), sorted(n.attempt.id for n in notes)
            jobs = {row["id"]: row for row in await connection.fetch(QUERIES["lock_noted_jobs"], job_ids)}
            attempts = {row["id"]: row for row in await connection.fetch(QUERIES["lock_noted_attempts"], attempt_ids)}
            fenced = [_fence_holds(note, jobs.get(note.job.id), attempts.get(note.attempt.id)) for note in notes]
            if current := [note for note, holds in zip(notes, fenced, strict=True) if holds]:
                await connection.execute(QUERIES["note_jobs"], *columns(map(_job_row, current)))
                await connection.execute(QUERIES["note_attempts"], *columns(map(_attempt_row, current)))
                await send_events(connection, _event_rows(current, jobs))
                topics = {f"job/{note.job.id}": None for note in current if note.events}
                is_signal = any(note.signal for note in current)
                await notify(connection, topics | ({"jobs": None} if is_signal else {}))
            return fenced

    async def claim_stored(self, *, lease_s: float, limit: int) -> Sequence[Job]:
        return [row_codec.job(row) for row in await self._pool.fetch("claim_stored", lease_s, limit)]

    async def unfinished_dependent(self, job_id: JobId) -> JobId | None:
        records = await self._pool.fetch("starts_from", job_id)
        return JobId(records[0]["id"]) if records else None

    async def charge_storage(self, charge: StorageCharge) -> bool:
        async with self._pool.transaction("charge_storage") as connection:
            row = await connection.fetchrow(QUERIES["lock_job"], charge.job_id)
            if row is None or row_codec.job(row).stored != charge.read:
                return False
            stored = row_codec.stored_json(charge.to)
            await connection.execute(QUERIES["charge_storage"], charge.job_id, stored, charge.due_in_s)
            if charge.usd:
                entry = row_codec.written_entry(job_data.entry_of(charge), self._pool.books.now())
                await connection.execute(QUERIES["write_ledger"], *columns([entry]))
            return True

    async def forget_uploads(self, *, older_than_s: float, limit: int) -> Sequence[str]:
        forgotten = {row["sha256"] for row in await self._pool.fetch("forget_uploads", older_than_s, limit)}
        return sorted(forgotten - set(await self.known_uploads(forgotten)))

    async def known_uploads(self, hashes: Collection[str]) -> Collection[str]:
        return {row["sha256"] for row in await self._pool.read("known_uploads", list(hashes))}


def _batches(notes: Sequence[Note]) -> Iterator[list[Note]]:
    """Yield the notes in order, in batches of `NOTES` at most that name no job twice."""
    batch: list[Note] = []
    for note in notes:
        if len(batch) == NOTES or any(note.job.id == other.job.id for other in batch):
            yield batch
            batch = []
        batch.append(note)
    if batch:
        yield batch


def _fence_holds(note: Note, job: row_codec.Record | None, attempt: row_codec.Record | None) -> bool:
    if job is None or attempt is None:
        return False
    return job_data.note_holds(note, row_codec.job(job), row_codec.attempt(attempt))


def _job_row(note: Note) -> tuple[Any, ...]:
    """Return a row of `note_jobs`."""
    reason = None if note.reason is None else fences.clean(note.reason)
    return note.job.id, row_codec.forecast_json(note.forecast), len(note.events), reason


def _attempt_row(note: Note) -> tuple[Any, ...]:
    """Return a row of `note_attempts`."""
    stays = None if note.stays is None else fences.clean(note.stays)
    return note.attempt.id, note.idle, note.signal and note.signal.value, stays


def _event_rows(notes: Sequence[Note], jobs: Mapping[str, row_codec.Record]) -> list[tuple[Any, ...]]:
    """Return rows of `write_events`, numbered from the counters of the locked jobs on."""
    return [
        row_codec.written_event(event, jobs[note.job.id]["event_seq"] + number)
        for note in notes
        for number, event in enumerate(note.events, start=1)
    ]
