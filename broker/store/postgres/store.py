"""`ports.Store` on PostgreSQL through asyncpg.

The statements are in sql/, the schema is in migrations/; this file maps methods to statements.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from broker.domain.errors import StoreError, StoreUnavailable
from broker.domain.ids import AttemptId, Installation
from broker.domain.job import Attempt, AttemptState, Job, JobState, Reason
from broker.domain.tenancy import OPERATOR, Tenant
from broker.domain.workload import RunObservation, SpotHours
from broker.ports import Change, Charge, Lane, Leased, Token
from broker.store.migrate import MIGRATIONS, load, newer
from broker.store.postgres import row_codec
from broker.store.postgres.apply import Applier
from broker.store.postgres.channels import PostgresChannels
from broker.store.postgres.job_data import PostgresGlobalJobData
from broker.store.postgres.listener import Listener
from broker.store.postgres.market.offer_history import PostgresOfferHistory
from broker.store.postgres.policies import PostgresGlobalPolicies
from broker.store.postgres.pool import Pool, columns
from broker.store.postgres.submit import Submitter
from broker.store.postgres.tenant import PostgresTenant
from broker.store.rules import fences

CHECKED_BLOCKS = 256
"""Blocks of each table that one check of the pages reads: 2 MiB."""
API_ROLE = "gpubroker_api"
"""Database role of the API, which migrations/0001_initial.sql creates."""


class PostgresStore(
    PostgresTenant, PostgresChannels, PostgresGlobalPolicies, PostgresGlobalJobData, PostgresOfferHistory
):
    """Store of the daemon; create it with `connect`. The schema must be up to date: see `broker.store.migrate`.

    The daemon's connections see every team. The API's connections use the role `API_ROLE`, which sees the rows of one
    tenant only.
    """

    def __init__(self, pool: Pool, api: Pool, dsn: str) -> None:
        super().__init__(pool, OPERATOR, Submitter(api), Listener(dsn), all_teams_pool=pool)
        self._api = api
        self._applier = Applier(pool)
        self._live = _LiveAttempts(pool)
        files = load(MIGRATIONS)
        self._newest = files[max(files)]
        self._next_block = 0
        """Block from which `check_pages` reads next."""

    @classmethod
    async def connect(cls, dsn: str, *, pool_size: int = 8) -> "PostgresStore":
        """Connect to the database. Raises StoreUnavailable."""
        pool = await Pool.connect(dsn, pool_size)
        api = await Pool.connect(dsn, pool_size, role=API_ROLE)
        (role,) = await api.read("api_role")
        if role["name"] != API_ROLE or role["passes"]:
            raise StoreError(
                f"the API's connections are of the role {role['name']}, which row-level security does not hold; "
                f"run: ALTER ROLE {API_ROLE} NOSUPERUSER NOBYPASSRLS"
            )
        return cls(pool, api, dsn)

    def as_tenant(self, tenant: Tenant) -> PostgresTenant:
        pool = self._api.as_tenant(tenant)
        return PostgresTenant(pool, tenant, self._submitter, self._listener, all_teams_pool=self._pool)

    def use_time(self, now: Callable[[], datetime]) -> None:
        self._pool.books.trusted = self._api.books.trusted = now

    # --- controllers

    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        states_wanted = dict.fromkeys(states, False) | dict.fromkeys(fences.WAITING_JOB_STATES - set(states), True)
        parameters = [state.value for state in states_wanted], list(states_wanted.values())
        records = await self._pool.fetch("claim_jobs", *parameters, limit, owner, lease_s)
        return sorted(map(row_codec.job, records), key=fences.place_in_queue)

    async def claim_attempts(
        self, lane: Lane, *, owner: str, lease_s: float, limit: int, turns: Mapping[str, float] | None = None
    ) -> Sequence[Leased]:
        own = (None, None) if turns is None else ([*turns], [*turns.values()])
        return _leased(await self._pool.fetch("claim_attempts", lane.value, limit, owner, lease_s, *own))

    async def claim_reviews(
        self, *, owner: str, providers: Sequence[str], older_s: float, own_older_s: float, limit: int
    ) -> Sequence[Leased]:
        return _leased(await self._pool.fetch("claim_reviews", owner, list(providers), limit, older_s, own_older_s))

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        return await self._applier.apply(changes)

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        for name, keys in (("release_jobs", jobs), ("release_attempts", attempts)):
            if keys:
                await self._pool.fetch(name, *columns((row.id, row.epoch) for row in keys), due_in_s)

    async def end_leases(self, *, owner: str) -> None:
        await self._pool.fetch("end_leases", owner)

    async def repair_due_times(self) -> None:
        for name in ("repair_jobs", "repair_attempts", "repair_streams", "repair_channels"):
            await self._pool.fetch(name)

    async def live_attempts(self) -> Sequence[Leased]:
        return await self._live.read(only_sent=False)

    async def sent_attempts(self) -> Sequence[Leased]:
        return await self._live.read(only_sent=True)

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        return {
            AttemptId(row["id"]): row_codec.attempt(row) for row in await self._pool.read("attempts_by_id", list(ids))
        }

    async def unproven_launches(self) -> Sequence[Attempt]:
        return [row_codec.attempt(row) for row in await self._pool.read("unproven_launches")]

    async def mark_launchers_finished(self, attempts: Sequence[Attempt]) -> None:
        await self._pool.fetch(
            "mark_launchers_finished", *columns((attempt.id, attempt.launched_by) for attempt in attempts)
        )

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        return await self._applier.apply([Change(charge=charge) for charge in charges])

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        values = [reason.value for reason in reasons]
        return [row_codec.attempt(row) for row in await self._pool.read("ended_at_host", host, values, within_s, limit)]

    async def upload_bytes(self, team: str, owner: str, sha256: str) -> int | None:
        records = await self._pool.read("upload", team, owner, sha256)
        return records[0]["bytes"] if records else None

    async def observations(self, *, max_per_pair: int) -> Sequence[RunObservation]:
        return [row_codec.observation(row) for row in await self._pool.read("observations", max_per_pair)]

    async def spot_hours(self, *, within_s: float) -> Sequence[SpotHours]:
        return [SpotHours(**row) for row in await self._pool.read("spot_hours", within_s)]

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        await self._pool.read("block_offer", key, fences.clean(reason), for_s)

    async def blocked_offers(self) -> Mapping[str, str]:
        return {row["offer_id"]: row["reason"] for row in await self._pool.read("blocked_offers")}

    # --- the daemon

    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        counts = {
            "jobs": dict.fromkeys((state.value for state in JobState), 0),
            "attempts": dict.fromkeys((state.value for state in AttemptState), 0),
        }
        for row in await self._pool.read("counts"):
            counts[row["of"]][row["state"]] = row["n"]
        return counts

    async def token(self, secret_sha256: str) -> Token | None:
        records = await self._pool.read("token", secret_sha256)
        return row_codec.token(records[0]) if records else None

    async def end_session(self, session_id: str, *, for_s: float) -> None:
        await self._pool.read("end_session", session_id, for_s)

    async def is_session_ended(self, session_id: str) -> bool:
        return bool((await self._pool.read("is_session_ended", session_id))[0]["ended"])

    async def installation(self, proposed: Installation) -> Installation:
        records = await self._pool.read("installation", proposed)
        # Empty if another broker inserted its row meanwhile; only a new statement sees that row.
        records = records or await self._pool.read("installation", proposed)
        return Installation(records[0]["id"])

    async def known_installation(self) -> Installation | None:
        """Return the installation id; None: no daemon has written one yet."""
        records = await self._pool.read("known_installation")
        return Installation(records[0]["id"]) if records else None

    async def blob_store(self, proposed: str) -> str:
        (row,) = await self._pool.fetch("blob_store", proposed)
        return str(row["blob_store"])

    async def adopt_blob_store(self, mark: str) -> None:
        await self._pool.fetch("adopt_blob_store", mark)

    async def master_key(self, proposed: str | None) -> str | None:
        (row,) = await self._pool.fetch("master_key", proposed)
        mark: str | None = row["master_key"]
        return mark

    async def adopt_master_key(self, mark: str) -> None:
        await self._pool.fetch("adopt_master_key", mark)

    async def database(self) -> str:
        """Return the identity of the database; a restored dump has another. Empty: the server does not report it."""
        try:
            return str((await self._pool.read("database"))[0]["id"])
        except StoreUnavailable:
            raise
        except StoreError:
            return ""

    async def ping(self) -> datetime:
        (row,) = await self._pool.fetch("ping")
        if row["version"] > self._newest.version:
            raise newer(row["name"], self._newest)
        now: datetime = row["now"]
        return now

    async def check_pages(self) -> None:
        first = self._next_block
        try:
            (read,) = await self._pool.fetch("read_pages", (first, 0), (first + CHECKED_BLOCKS, 0))
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreError(f"the database is damaged: {error}; restore it: see Back up in operating.md") from error
        self._next_block = first + CHECKED_BLOCKS if first + CHECKED_BLOCKS < read["blocks"] else 0
        for row in await self._pool.fetch("checksum_failures"):
            raise StoreError(
                f"the database is damaged: {row['failures']} pages failed their checksum, the last within an hour; "
                "find them with pg_amcheck, and restore the backup"
            )

    async def close(self) -> None:
        await self._submitter.close()
        await self._applier.close()
        await self._listener.close()
        await self._api.close()
        await self._pool.close()


class _LiveAttempts:
    """Live attempts of the latest reads.

    A read fetches the versions of the selected rows, and the whole rows of new attempts. From other changed rows it
    fetches only the columns that statements change, because spec and offer are most of a row.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._rows: dict[str, tuple[tuple[int, int], Leased]] = {}
        """Version of the attempt's and of the job's row, and both rows, by the attempt's id."""
        self._lock = asyncio.Lock()

    async def read(self, *, only_sent: bool) -> Sequence[Leased]:
        """Return all live attempts, or those whose create was sent. The rows of other planned attempts are retained."""
        async with self._lock:
            records = await self._pool.read("sent_versions" if only_sent else "live_versions")
            versions = {row["id"]: (row["version"], row["j_version"]) for row in records}
            rows = {
                key: known
                for key, known in self._rows.items()
                if key in versions or (only_sent and known[1].attempt.create_sent_at is None)
            }
            new = [key for key in versions if key not in rows]
            changed = {key for key, version in versions.items() if key in rows and rows[key][0] != version}
            current = {**await self._new(new), **await self._changed([*changed])}
            self._rows = {key: known for key, known in rows.items() if key not in changed} | current
            return [self._rows[key][1] for key in versions if key in self._rows]

    async def _new(self, ids: Sequence[str]) -> dict[str, tuple[tuple[int, int], Leased]]:
        records = await self._pool.read("live_attempts", ids) if ids else []
        rows = zip(records, _leased(records), strict=True)
        return {record["id"]: (_version(record), leased) for record, leased in rows}

    async def _changed(self, ids: Sequence[str]) -> dict[str, tuple[tuple[int, int], Leased]]:
        records = await self._pool.read("live_changes", ids) if ids else []
        return {row["id"]: (_version(row), row_codec.changed(self._rows[row["id"]][1], row)) for row in records}


def _version(row: row_codec.Record) -> tuple[int, int]:
    return row["version"], row["j_version"]


def _leased(records: Sequence[row_codec.Record]) -> list[Leased]:
    return [Leased(attempt=row_codec.attempt(row), job=row_codec.job(row, "j_")) for row in records]
