"""Policies, and the spending and machines under them, on PostgreSQL."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import asyncpg

from broker.domain.errors import OverBudget
from broker.domain.ids import JobId
from broker.domain.job import TERMINAL_JOB_STATES, Event, Job
from broker.domain.notifications import Notice
from broker.domain.policy import Policy, PolicyVersion, StoredPolicy
from broker.policy.budgets import Applied, Reached, extension
from broker.policy.dry_run import History, LedgerAttempt, StorageSpending
from broker.ports.policies import JobOwner
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.budgets import AdmissionBudget, policy_of, with_usage
from broker.store.postgres.channels import posted
from broker.store.postgres.pool import QUERIES, BooksTime, Connection, Pool, columns
from broker.store.rules import fences
from broker.store.rules import policies as policy_rules


class PostgresTenantPolicies(PostgresPart):
    _all_teams_pool: Pool
    """Pool that sees all teams. A policy may cover other teams' jobs, which the tenant's own pool does not show."""

    async def put_policy(self, policy: Policy, *, replaces: int | None = None) -> StoredPolicy:
        policy_rules.check(self._tenant, policy)
        document, actor = policy.model_dump_json(), self._tenant.owner
        async with self._pool.transaction("put_policy") as connection:
            await connection.execute(QUERIES["enter_policy"])
            stored = await connection.fetchrow(QUERIES["lock_policy"], policy.team, policy.name)
            before = policy_of(stored["document"]) if stored and stored["document"] else None
            if stored is not None and before == policy:
                return _stored_policy(stored)
            policy_rules.check_version(policy, stored["version"] if stored else 0, before is None, replaces)
            values = policy.team, policy.user, policy.name, document, actor
            (row,) = await connection.fetch(QUERIES["put_policy"], *values)
            await self._record(connection, row, before)
            return _stored_policy(row)

    async def delete_policy(self, team: str | None, name: str, version: int | None = None) -> bool:
        async with self._pool.transaction("delete_policy") as connection:
            stored = await connection.fetchrow(QUERIES["lock_policy"], team, name)
            if stored is None or stored["document"] is None:
                return False
            if version not in (None, stored["version"]):
                return False
            (row,) = await connection.fetch(QUERIES["delete_policy"], stored["id"], self._tenant.owner)
            await self._record(connection, row, policy_of(stored["document"]))
            return True

    async def _record(self, connection: Connection, row: asyncpg.Record, before: Policy | None) -> None:
        """Write the new version to the history and to the audit log."""
        values = row["id"], row["team"], row["version"], row["document"], row["changed_at"], row["changed_by"]
        await connection.execute(QUERIES["write_policy_version"], *values)
        after = policy_of(row["document"]) if row["document"] else None
        await write_audit(connection, [policy_rules.changed(self._tenant, before, after)])

    async def policies(self) -> Sequence[StoredPolicy]:
        return [_stored_policy(row) for row in await self._pool.read("policies")]

    async def policy_history(self, team: str | None, name: str) -> Sequence[PolicyVersion]:
        return [
            PolicyVersion(
                version=row["version"],
                policy=policy_of(row["document"]) if row["document"] else None,
                at=row["at"],
                actor=row["actor"],
            )
            for row in await self._pool.read("policy_history", team, name)
        ]

    async def budgets(self) -> tuple[datetime, Sequence[Applied]]:
        async with self._pool.transaction("budgets") as connection:
            records = await connection.fetch(QUERIES["policies"])
            now = self._pool.books.now() or await connection.fetchval(QUERIES["now"])
            if not records:
                return now, []
            now, applied = await with_usage(connection, records, self._pool.books)
            return now, list(applied.values())

    async def past(self, since: datetime) -> History:
        async with self._pool.transaction("past") as connection:
            now = self._pool.books.now() or await connection.fetchval(QUERIES["now"])
            attempts = [_past(row) for row in await connection.fetch(QUERIES["past_attempts"], since)]
            others = [StorageSpending(**dict(row)) for row in await connection.fetch(QUERIES["past_others"], since)]
        return History(now=now, attempts=attempts, others=others)

    async def approve(
        self, job_id: JobId, up_to_usd: Decimal, event: Event, *, cap_usd: Decimal | None = None
    ) -> Job | None:
        async with self._pool.transaction("approve") as connection:
            record = await connection.fetchrow(QUERIES["lock_job"], job_id)
            job = row_codec.job(record) if record else None
            if job is None or job.state in TERMINAL_JOB_STATES or (job.approved_usd or 0) >= up_to_usd:
                return job
            if cap_usd not in (None, job.cap_usd):
                return job
            (row,) = await connection.fetch(QUERIES["approve"], job_id, up_to_usd)
            await self._write_event(connection, event, row)
            await write_audit(connection, [fences.approved(self._tenant, job, up_to_usd)])
            return row_codec.job(row)

    async def raise_cap(self, job_id: JobId, cap_usd: Decimal, event: Event) -> Job | None:
        if not await self._pool.read("job", job_id):
            return None
        async with self._all_teams_pool.transaction("raise_cap") as connection:
            record = await connection.fetchrow(QUERIES["lock_job"], job_id)
            job = row_codec.job(record) if record else None
            if job is None or cap_usd <= job.cap_usd or fences.cannot_run_again(job):
                return job
            await _extend(connection, self._pool.books, job, cap_usd)
            (row,) = await connection.fetch(QUERIES["raise_cap"], job_id, cap_usd)
            await self._write_event(connection, event, row)
            await write_audit(connection, [fences.cap_raised(self._tenant, job, cap_usd)])
            return row_codec.job(row)


class PostgresGlobalPolicies(PostgresPart):
    async def applied(self, whose: Sequence[JobOwner]) -> tuple[datetime, Mapping[JobOwner, Sequence[Applied]]]:
        teams, owners = [team for team, _ in whose], [owner for _, owner in whose]
        async with self._pool.transaction("applied") as connection:
            records = await connection.fetch(QUERIES["policies_of"], teams, owners)
            now = self._pool.books.now() or await connection.fetchval(QUERIES["now"])
            if not records:
                return now, dict.fromkeys(whose, ())
            now, applied = await with_usage(connection, records, self._pool.books)
        return now, {owner_key: [a for a in applied.values() if a.policy.covers(*owner_key)] for owner_key in whose}

    async def post_threshold(self, policy_id: int, reached: Reached, notice: Notice, *, since: datetime) -> bool:
        async with self._pool.transaction("post_threshold") as connection:
            if not await connection.fetch(QUERIES["lock_policy_id"], policy_id):
                return False
            values = reached.budget.key, reached.threshold.at, reached.threshold.action.value, since
            if not await connection.fetch(QUERIES["post_threshold"], policy_id, *values, self._pool.books.now()):
                return False
            await connection.fetch(QUERIES["post"], *posted(notice))
            return True


async def _extend(connection: Connection, books: BooksTime, job: Job, cap_usd: Decimal) -> None:
    """Increase the reservation of the live attempt, if there is one. Raises OverBudget."""
    record = await connection.fetchrow(QUERIES["live_attempt"], job.id)
    attempt = row_codec.attempt(record) if record else None
    ask = extension(job, attempt, cap_usd)
    if ask is None or attempt is None:
        return
    admission_budget = await AdmissionBudget.locked(connection, [(job.team, job.owner)], books)
    refusal = admission_budget.admit(ask, (job.team, job.owner))
    if refusal is not None:
        raise OverBudget(policy_rules.no_higher_cap(job, refusal))
    await connection.execute(QUERIES["extend_reservation"], attempt.id, ask.reserve_usd)
    entry = row_codec.written_entry(policy_rules.extended(attempt, ask.reserve_usd), books.now())
    await connection.execute(QUERIES["write_ledger"], *columns([entry]))


def _stored_policy(row: asyncpg.Record) -> StoredPolicy:
    return StoredPolicy(
        id=row["id"],
        version=row["version"],
        policy=policy_of(row["document"]),
        changed_at=row["changed_at"],
        changed_by=row["changed_by"],
    )


def _past(row: asyncpg.Record) -> LedgerAttempt:
    return LedgerAttempt(
        job_id=JobId(row["job_id"]),
        number=row["number"],
        team=row["team"],
        owner=row["owner"],
        gpus=row["gpus"],
        cap_usd=row["cap_usd"],
        reserved_usd=row["reserved_usd"],
        at=row["at"],
        ended_at=row["ended_at"],
        charges=tuple(zip(row["buckets"], row["dollars"], strict=True)),
    )
