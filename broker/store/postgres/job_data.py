"""Stored data, forecasts and storage charges of jobs on PostgreSQL."""

import asyncio
from collections.abc import Collection, Sequence

from broker.domain.ids import JobId
from broker.domain.job import Event, Job, StoredKind
from broker.lifecycle.retention import RESUMED_FROM
from broker.ports import Note, StorageCharge
from broker.store.postgres import row_codec
from broker.store.postgres.apply import notify, send_events
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.pool import QUERIES, Pool, columns
from broker.store.rules import fences, job_data

NOTES_AT_ONCE = 4
"""Maximum number of notes that are written concurrently, so that one flush of the log serves several."""


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
            new = sorted(set(kinds) - job.deleted.keys())
            if not new:
                return job
            (row,) = await connection.fetch(QUERIES["delete_data"], job_id, new)
            await self._write_event(connection, event, row)
            await write_audit(connection, [job_data.data_deleted(self._tenant, job, new)])
            return row_codec.job(row)


class PostgresGlobalJobData(PostgresPart):
    """The part of job data that the controllers use."""

    async def note(self, notes: Sequence[Note]) -> Sequence[bool]:
        gate = asyncio.Semaphore(NOTES_AT_ONCE)

        async def write(note: Note) -> bool:
            async with gate:
                return await self._note(note)

        outcomes = await asyncio.gather(*map(write, notes), return_exceptions=True)
        for error in (outcome for outcome in outcomes if isinstance(outcome, BaseException)):
            raise error
        return [outcome is True for outcome in outcomes]

    async def _note(self, note: Note) -> bool:
        """Lock jobs before attempts, in the same order as all other writers."""
        async with self._pool.transaction("note") as connection:
            job = await connection.fetchrow(QUERIES["lock_job"], note.job.id)
            attempt = await connection.fetchrow(QUERIES["lock_attempt"], note.attempt.id)
            if (
                job is None
                or attempt is None
                or not job_data.note_holds(note, row_codec.job(job), row_codec.attempt(attempt))
            ):
                return False
            events = [
                row_codec.written_event(event, job["event_seq"] + n) for n, event in enumerate(note.events, start=1)
            ]
            reason = None if note.reason is None else fences.clean(note.reason)
            forecast = row_codec.forecast_json(note.forecast)
            await connection.execute(QUERIES["note_job"], note.job.id, forecast, len(events), reason)
            signal = note.signal and note.signal.value
            stays = None if note.stays is None else fences.clean(note.stays)
            await connection.execute(QUERIES["note_attempt"], note.attempt.id, note.idle, signal, stays)
            await send_events(connection, events)
            topics = {f"job/{note.job.id}": None} if events else {}
            await notify(connection, topics | ({"jobs": None} if signal else {}))
            return True

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
