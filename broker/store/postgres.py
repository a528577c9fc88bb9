"""`ports.Store` on PostgreSQL through asyncpg.

The statements are in queries.sql, the rules in migrations/; this file only says which statement serves which method.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal

from pydantic import TypeAdapter

from broker.domain.ids import AttemptId, Installation, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, AttemptState, Event, Job, JobState, LedgerEntry, Reason
from broker.ports import Change, Charge, JobFilter, Lane, Leased, Token, Upload
from broker.store import fences, rows
from broker.store.postgres_apply import Applier, notify, send_events
from broker.store.postgres_hints import Listener
from broker.store.postgres_pool import QUERIES, Connection, Pool, columns
from broker.store.postgres_submit import Submitter

_LABELS = TypeAdapter(dict[str, str])


class PostgresStore:
    """Make one with `connect`. The schema must be up to date: see `broker.store.migrate`."""

    def __init__(self, pool: Pool, dsn: str, *, outbox: bool) -> None:
        self._pool = pool
        self._outbox = outbox
        self._applier = Applier(pool, outbox=outbox)
        self._submitter = Submitter(pool, outbox=outbox)
        self._listener = Listener(dsn)

    @classmethod
    async def connect(cls, dsn: str, *, pool_size: int = 8, outbox: bool = True) -> "PostgresStore":
        """`outbox`: keep events for a notifier; without one they would only pile up. Raises StoreUnavailable."""
        return cls(await Pool.connect(dsn, pool_size), dsn, outbox=outbox)

    # --- controllers

    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        asked = dict.fromkeys(states, False) | dict.fromkeys(fences.WAITING_JOB_STATES - set(states), True)
        wanted = [state.value for state in asked], list(asked.values())
        return [rows.job(row) for row in await self._pool.fetch("claim_jobs", *wanted, limit, owner, lease_s)]

    async def claim_attempts(self, lane: Lane, *, owner: str, lease_s: float, limit: int) -> Sequence[Leased]:
        return _leased(await self._pool.fetch("claim_attempts", lane.value, limit, owner, lease_s))

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        return await self._applier.apply(changes)

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        for name, held in (("release_jobs", jobs), ("release_attempts", attempts)):
            if held:
                await self._pool.fetch(name, *columns((row.id, row.epoch) for row in held), due_in_s)

    async def live_attempts(self) -> Sequence[Leased]:
        return _leased(await self._pool.read("live_attempts"))

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        return {AttemptId(row["id"]): rows.attempt(row) for row in await self._pool.read("attempts_by_id", list(ids))}

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        return await self._applier.apply([Change(charge=charge) for charge in charges])

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        wanted = [reason.value for reason in reasons]
        return [rows.attempt(row) for row in await self._pool.read("ended_at_host", host, wanted, within_s, limit)]

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        await self._pool.read("block_offer", key, fences.clean(reason), for_s)

    async def blocked_offers(self) -> Mapping[str, str]:
        return {row["offer_id"]: row["reason"] for row in await self._pool.read("blocked_offers")}

    async def claim_outbox(self, *, owner: str, lease_s: float, limit: int) -> Sequence[Event]:
        return [rows.event(row) for row in await self._pool.fetch("claim_outbox", owner, lease_s, limit)]

    async def delivered(self, events: Sequence[Event]) -> None:
        if events:
            await self._pool.read("delivered", *columns((event.job_id, event.seq) for event in events))

    # --- the API's use cases

    async def submit(self, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]) -> tuple[Job, bool]:
        return await self._submitter.submit(job, key=key, body_sha256=body_sha256, events=events)

    async def job(self, job_id: JobId) -> Job | None:
        found = await self._pool.read("job", job_id)
        return rows.job(found[0]) if found else None

    async def jobs(self, where: JobFilter) -> Sequence[Job]:
        found = await self._pool.read(
            "jobs",
            where.owner,
            [state.value for state in where.states],
            _LABELS.dump_json(dict(where.labels)).decode(),
            where.since,
            where.until,
            *(where.before or (None, None)),
            where.limit,
        )
        return [rows.job(row) for row in found]

    async def attempts(self, job_id: JobId) -> Sequence[Attempt]:
        return [rows.attempt(row) for row in await self._pool.read("attempts", job_id)]

    async def request_stop(self, job_id: JobId, event: Event) -> Job | None:
        async with self._pool.transaction("request_stop") as connection:
            job = await _locked(connection, job_id)
            if job is None or job.stop_requested or job.state in RESTING_JOB_STATES:
                return job
            (row,) = await connection.fetch(QUERIES["request_stop"], job_id)
            await connection.execute(QUERIES["stop_attempts"], job_id)
            await self._tell(connection, event, row)
            return rows.job(row)

    async def raise_cap(self, job_id: JobId, cap_usd: Decimal, event: Event) -> Job | None:
        async with self._pool.transaction("raise_cap") as connection:
            job = await _locked(connection, job_id)
            if job is None or cap_usd <= job.cap_usd:
                return job
            (row,) = await connection.fetch(QUERIES["raise_cap"], job_id, cap_usd)
            await self._tell(connection, event, row)
            return rows.job(row)

    async def _tell(self, connection: Connection, event: Event, job: rows.Record) -> None:
        await send_events(connection, [rows.written_event(event, job["event_seq"])], outbox=self._outbox)
        await notify(connection, {"jobs": None, f"job/{job['id']}": None})

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]:
        return [rows.event(row) for row in await self._pool.read("events", job_id, after, limit)]

    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]:
        return [rows.ledger_entry(row) for row in await self._pool.read("ledger", job_id)]

    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        counts = {
            "jobs": dict.fromkeys((state.value for state in JobState), 0),
            "attempts": dict.fromkeys((state.value for state in AttemptState), 0),
        }
        for row in await self._pool.read("counts"):
            counts[row["of"]][row["state"]] = row["n"]
        return counts

    async def wait(self, topic: str, timeout_s: float) -> bool:
        return await self._listener.wait(topic, timeout_s)

    async def put_token(self, token: Token, secret_sha256: str) -> None:
        scopes = list(token.scopes)
        await self._pool.fetch(
            "put_token", token.id, token.owner, scopes, token.created_at, fences.clean(token.note), secret_sha256
        )

    async def token(self, secret_sha256: str) -> Token | None:
        found = await self._pool.read("token", secret_sha256)
        return rows.token(found[0]) if found else None

    async def tokens(self) -> Sequence[Token]:
        return [rows.token(row) for row in await self._pool.read("tokens")]

    async def delete_token(self, token_id: str) -> bool:
        return bool(await self._pool.fetch("delete_token", token_id))

    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None:
        await self._pool.read("put_secret", owner, name, sealed)

    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        found = await self._pool.read("secrets", owner, None if names is None else list(names))
        return {row["name"]: row["sealed"] for row in found}

    async def delete_secret(self, owner: str, name: str) -> bool:
        return bool(await self._pool.fetch("delete_secret", owner, name))

    async def put_upload(self, owner: str, upload: Upload) -> None:
        summary = rows.summary_json(upload.summary)
        await self._pool.read("put_upload", owner, upload.sha256, upload.bytes, fences.clean(upload.name), summary)

    async def upload(self, owner: str, sha256: str) -> Upload | None:
        found = await self._pool.read("upload", owner, sha256)
        return rows.upload(found[0]) if found else None

    # --- the house

    async def installation(self, proposed: Installation) -> Installation:
        found = await self._pool.read("installation", proposed)
        # Another broker's insert that committed meanwhile is seen by the next statement only.
        found = found or await self._pool.read("installation", proposed)
        return Installation(found[0]["id"])

    async def ping(self) -> None:
        await self._pool.fetch("ping")

    async def close(self) -> None:
        await self._submitter.close()
        await self._listener.close()
        await self._pool.close()


def _leased(found: Sequence[rows.Record]) -> list[Leased]:
    return [Leased(attempt=rows.attempt(row), job=rows.job(row, "j_")) for row in found]


async def _locked(connection: Connection, job_id: JobId) -> Job | None:
    row = await connection.fetchrow(QUERIES["lock_job"], job_id)
    return rows.job(row) if row else None
