"""`ports.TenantStore` on PostgreSQL: the operations of the API, restricted to one tenant.

A separate concern, such as policies, is a `PostgresPart` in its own module, and a base of `PostgresTenant`.
"""

from collections.abc import Mapping, Sequence

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Event, Job
from broker.domain.money import LedgerEntry
from broker.domain.tenancy import Tenant
from broker.ports import JobFilter, Upload
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.channels import PostgresTenantChannels
from broker.store.postgres.job_data import PostgresTenantJobData
from broker.store.postgres.listener import Listener
from broker.store.postgres.market.offer_history import PostgresTenantOfferHistory
from broker.store.postgres.policies import PostgresTenantPolicies
from broker.store.postgres.pool import QUERIES, Connection, Pool
from broker.store.postgres.slack_users import PostgresSlackUsers
from broker.store.postgres.spending import PostgresSpending
from broker.store.postgres.submit import Submitter
from broker.store.postgres.teams import PostgresTeams
from broker.store.rules import fences


class PostgresTenant(
    PostgresTeams,
    PostgresTenantChannels,
    PostgresTenantPolicies,
    PostgresTenantJobData,
    PostgresTenantOfferHistory,
    PostgresSlackUsers,
    PostgresSpending,
    PostgresPart,
):
    """View of one tenant, created by `PostgresStore.as_tenant`.

    `all_teams_pool`: the daemon's pool, which sees every team.
    """

    def __init__(
        self, pool: Pool, tenant: Tenant, submitter: Submitter, listener: Listener, *, all_teams_pool: Pool
    ) -> None:
        super().__init__(pool, tenant)
        self._all_teams_pool = all_teams_pool
        self._submitter = submitter
        self._listener = listener

    async def submit(self, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]) -> tuple[Job, bool]:
        return await self._submitter.submit(self._tenant, job, key=key, body_sha256=body_sha256, events=events)

    async def job(self, job_id: JobId) -> Job | None:
        records = await self._pool.read("job", job_id)
        return row_codec.job(records[0]) if records else None

    async def jobs(self, where: JobFilter) -> Sequence[Job]:
        states, labels = [state.value for state in where.states], [f"{k}:{v}" for k, v in where.labels.items()]
        values = where.owner, states, where.since, where.until, *(where.before or (None, None)), where.limit, where.team
        name, rest = ("labelled_jobs", [labels]) if labels else ("jobs", [])
        records = await self._pool.read(name, *values, *rest)
        return [row_codec.job(row) for row in records]

    async def attempts(self, job_id: JobId) -> Sequence[Attempt]:
        return [row_codec.attempt(row) for row in await self._pool.read("attempts", job_id)]

    async def request_stop(self, job_id: JobId, event: Event) -> Job | None:
        async with self._pool.transaction("request_stop") as connection:
            job = await _locked(connection, job_id)
            if job is None or job.stop_requested or job.state in RESTING_JOB_STATES:
                return job
            (row,) = await connection.fetch(QUERIES["request_stop"], job_id)
            await connection.execute(QUERIES["stop_attempts"], job_id)
            await self._write_event(connection, event, row)
            await write_audit(connection, [fences.stopped(self._tenant, job)])
            return row_codec.job(row)

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]:
        return [row_codec.event(row) for row in await self._pool.read("events", job_id, after, limit)]

    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]:
        return [row_codec.ledger_entry(row) for row in await self._pool.read("ledger", job_id)]

    async def decision(self, attempt_id: AttemptId) -> bytes | None:
        records = await self._pool.read("decision", attempt_id)
        return records[0]["document"] if records else None

    async def wait(self, topic: str, timeout_s: float) -> bool:
        return await self._listener.wait(topic, timeout_s)

    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None:
        async with self._pool.transaction("put_secret") as connection:
            await connection.execute(QUERIES["put_secret"], self._tenant.team, owner, name, sealed)
            await write_audit(connection, [self._tenant.audit_entry("secret.set", name)])

    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        name_list = None if names is None else list(names)
        records = await self._pool.read("secrets", self._tenant.team, owner, name_list)
        return {row["name"]: row["sealed"] for row in records}

    async def delete_secret(self, owner: str, name: str) -> bool:
        async with self._pool.transaction("delete_secret") as connection:
            if not await connection.fetch(QUERIES["delete_secret"], self._tenant.team, owner, name):
                return False
            await write_audit(connection, [self._tenant.audit_entry("secret.delete", name)])
            return True

    async def put_upload(self, owner: str, upload: Upload) -> None:
        values = upload.bytes, fences.clean(upload.name), row_codec.summary_json(upload.summary)
        async with self._pool.transaction("put_upload") as connection:
            await connection.execute(QUERIES["put_upload"], self._tenant.team, owner, upload.sha256, *values)
            await write_audit(connection, [fences.uploaded(self._tenant, upload)])

    async def upload(self, owner: str, sha256: str) -> Upload | None:
        records = await self._pool.read("upload", self._tenant.team, owner, sha256)
        return row_codec.upload(records[0]) if records else None


async def _locked(connection: Connection, job_id: JobId) -> Job | None:
    row = await connection.fetchrow(QUERIES["lock_job"], job_id)
    return row_codec.job(row) if row else None
