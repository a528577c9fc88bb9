"""Row-level security on a real PostgreSQL: the rows that the API's connections see, and the need for each policy."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from broker.domain.errors import StoreError
from broker.domain.tenancy import Tenant
from broker.ports import JobFilter
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import MigrationError, migrate
from broker.store.postgres.pool import Pool
from broker.store.postgres.store import API_ROLE, PostgresStore
from tests.conformance.samples import make_job
from tests.security import catalogue
from tests.security.catalogue import Connection, as_red, faults, owned, shown, unprotected
from tests.security.seed import BLUE, RED, seed


@pytest.fixture
async def seeded(postgres_dsn: str) -> str:
    await seed(postgres_dsn)
    return postgres_dsn


@pytest.fixture
async def connection(seeded: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(seeded)
    yield connection
    await connection.close()


async def test_each_team_sees_its_own_rows_and_an_operator_all(connection: Connection) -> None:
    for team in (RED, BLUE):
        assert all(count > 0 for count in (await owned(connection, team)).values()), "seed every table in seed.py"
    assert await faults(connection, (RED, BLUE)) == []
    assert await shown(connection, RED, operator=True) == await owned(connection)


@pytest.mark.parametrize("team", [None, "", "green", "%", "red'; --"])
async def test_without_the_setting_or_with_a_strange_one_there_are_no_rows(
    connection: Connection, team: str | None
) -> None:
    found = await shown(connection, team)
    assert found == dict.fromkeys(found, 0)


async def test_every_table_with_team_rows_has_row_level_security(connection: Connection) -> None:
    assert await unprotected(connection) == []
    for statement in (
        "CREATE TABLE news (team text)",
        "CREATE TABLE news (job_id text)",
        f"CREATE TABLE news (id text); GRANT SELECT (id) ON news TO {API_ROLE}",
        "CREATE TABLE news (team text); ALTER TABLE news ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE jobs RENAME TO news; ALTER TABLE news NO FORCE ROW LEVEL SECURITY",
        "ALTER TABLE jobs RENAME TO news; ALTER TABLE news DISABLE ROW LEVEL SECURITY",
    ):
        change = connection.transaction()
        await change.start()
        await connection.execute(statement)
        assert await unprotected(connection) == ["news"], statement
        await change.rollback()


async def test_each_row_level_policy_is_necessary(connection: Connection) -> None:
    """A table without its policy hides a team's own rows. A table without row-level security shows the rows of all
    teams.
    """
    for name in await owned(connection, RED):
        for statement in (f"DROP POLICY team ON {name}", f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY"):
            change = connection.transaction()
            await change.start()
            await connection.execute(statement)
            assert any(fault.endswith(f" {name}") for fault in await faults(connection, (RED, BLUE))), statement
            await change.rollback()


async def test_the_role_bypasses_no_policy_and_has_minimal_rights(connection: Connection) -> None:
    role = await connection.fetchrow("SELECT * FROM pg_roles WHERE rolname = $1", API_ROLE)
    assert role is not None
    rights = ("rolsuper", "rolbypassrls", "rolcreaterole", "rolcreatedb", "rolcanlogin", "rolreplication")
    assert [role[name] for name in rights] == [False] * 6
    untouched = {
        "installation",
        "offer_blocks",
        "schema_migrations",
        "notices",
        "seen",
        "policy_told",
        "ended_sessions",
    }
    granted = {table["name"] for table in await catalogue.tables(connection) if table["granted"]}
    assert granted & untouched == set()
    for statement in (
        "DELETE FROM jobs", "DELETE FROM attempts", "DELETE FROM events", "DELETE FROM ledger", "DELETE FROM audit",
        "UPDATE events SET message = ''", "UPDATE ledger SET usd = 0", "UPDATE audit SET actor = ''",
        "UPDATE jobs SET spent_usd = 0", "UPDATE jobs SET team = 'red'", "UPDATE attempts SET charged_usd = 0",
        "INSERT INTO ledger (job_id, attempt_id, kind, usd, note) SELECT id, id, 'release', 1, '' FROM jobs",
        "UPDATE tokens SET scopes = '{admin}'", "SELECT secret_sha256 FROM tokens", "TRUNCATE audit",
        "ALTER TABLE jobs DISABLE ROW LEVEL SECURITY", "DROP POLICY team ON jobs",
    ):  # fmt: skip
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await as_red(connection, statement)


async def test_a_team_writes_for_itself_only(connection: Connection) -> None:
    job = await connection.fetchval("SELECT id FROM jobs WHERE team = 'blue'")
    for statement in (
        "INSERT INTO secrets (team, owner, name, sealed) VALUES ('blue', 'ann', 'X', '')",
        "INSERT INTO tokens (id, team, owner, scopes, created_at, note, secret_sha256) "
        "VALUES ('t', 'blue', 'eve', '{admin}', now(), '', 'x')",
        f"INSERT INTO events (job_id, seq, kind, message, data) VALUES ('{job}', 99, 'x', '', '{{}}')",
        "INSERT INTO audit (team, actor, token_id, action, target) VALUES ('blue', 'eve', '', 'x', '')",
        "INSERT INTO teams (name, note) VALUES ('green', '')",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            await as_red(connection, statement)


async def test_the_audit_is_append_only_for_everybody(connection: Connection) -> None:
    for statement in ("UPDATE audit SET actor = ''", "DELETE FROM audit", "TRUNCATE audit"):
        with pytest.raises(asyncpg.RestrictViolationError, match="append-only"):
            await connection.execute(statement)


async def test_a_connection_never_carries_a_team_to_the_next_caller(seeded: str) -> None:
    pool = await Pool.connect(seeded, 1, role=API_ROLE)
    anybody: tuple[object, ...] = (None, [], None, None, None, None, 9, None)
    red = pool.as_tenant(Tenant(team=RED, owner="ann"))
    operator = pool.as_tenant(Tenant(team=RED, owner="ann", operator=True))
    try:
        for tenant, sees in ((red, 1), (operator, 2)):
            assert len(await tenant.read("jobs", *anybody)) == sees
            assert await pool.read("jobs", *anybody) == []
        with pytest.raises(StoreError):
            async with operator.transaction("breaks") as connection:
                await connection.execute("SELECT 1 / 0")
        assert await pool.read("jobs", *anybody) == []
        with pytest.raises(asyncio.CancelledError):
            async with operator.transaction("is cancelled"):
                raise asyncio.CancelledError
        assert await pool.read("jobs", *anybody) == []
    finally:
        await pool.close()


async def test_a_role_that_bypasses_policies_is_refused(postgres_server: EmbeddedPostgres, postgres_dsn: str) -> None:
    connection = await asyncpg.connect(postgres_server.admin_dsn)
    try:
        await connection.execute(f"ALTER ROLE {API_ROLE} BYPASSRLS")
        with pytest.raises(StoreError, match=f"ALTER ROLE {API_ROLE} NOSUPERUSER NOBYPASSRLS"):
            await PostgresStore.connect(postgres_dsn)
    finally:
        await connection.execute(f"ALTER ROLE {API_ROLE} NOBYPASSRLS")
        await connection.close()


# ------------------------------------------------------------------------------------------ a cluster without the role


@pytest.fixture
async def cluster() -> AsyncIterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="gb-"))
    try:
        async with await EmbeddedPostgres.start(folder, durable=False) as server:
            await run(server.admin_dsn, "DROP ROLE gpubroker_api")
            yield server.admin_dsn
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def run(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def test_databases_of_one_cluster_migrate_at_once(cluster: str) -> None:
    names = [f"broker_{number}" for number in range(4)]
    await run(cluster, *(f"CREATE DATABASE {name}" for name in names))
    dsns = [urlunsplit(urlsplit(cluster)._replace(path=f"/{name}")) for name in names]
    await asyncio.gather(*map(migrate, dsns))
    for dsn in dsns:
        await seed(dsn)


async def test_external_servers_user_needs_two_administrator_statements(cluster: str) -> None:
    """The user owns its database and may create no role. The error names two statements that make isolation work."""
    await run(cluster, "CREATE ROLE broker LOGIN", "CREATE DATABASE broker OWNER broker")
    parts = urlsplit(cluster)
    dsn = urlunsplit(parts._replace(netloc=parts.netloc.replace("postgres@", "broker@"), path="/broker"))
    with pytest.raises(MigrationError) as refused:
        await migrate(dsn)
    assert "\n" not in str(refused.value)
    statements = str(refused.value).partition("ask an administrator to run: ")[2].split(";")[:2]
    assert [statement.split()[0] for statement in statements] == ["CREATE", "GRANT"]
    await run(cluster, statements[0])
    with pytest.raises(MigrationError, match="GRANT gpubroker_api TO broker;"):
        await migrate(dsn)
    await run(cluster, statements[1])
    await migrate(dsn)
    await seed(dsn)
    connection = await asyncpg.connect(dsn)
    try:
        assert await faults(connection, (RED, BLUE)) == []
        assert await connection.fetchval("SELECT count(DISTINCT team) FROM jobs") == 2
        await connection.execute("DROP POLICY daemon ON jobs")  # it owns the table, and FORCE holds owners too
        assert await connection.fetchval("SELECT count(*) FROM jobs") == 0
    finally:
        await connection.close()


async def test_a_group_of_submissions_keeps_its_teams_apart(postgres_dsn: str) -> None:
    store = await PostgresStore.connect(postgres_dsn)
    try:
        for team in (RED, BLUE):
            await store.put_team(team, "")
        tenants = {team: store.as_tenant(Tenant(team=team, owner="ann")) for team in (RED, BLUE)}
        jobs = [make_job(team=(RED, BLUE)[number % 2]) for number in range(40)]
        forged = make_job(team=BLUE)
        waiting = [
            tenants[job.team].submit(job, key=f"k{n // 2}", body_sha256="", events=[]) for n, job in enumerate(jobs)
        ]
        *made, refused = await asyncio.gather(
            *waiting,
            tenants[RED].submit(forged, key=None, body_sha256="", events=[]),
            return_exceptions=True,
        )
        assert isinstance(refused, StoreError)
        assert [answer[1] for answer in made if isinstance(answer, tuple)] == [True] * 40
        for team, tenant in tenants.items():
            stored_jobs = await tenant.jobs(JobFilter(limit=99))
            assert {job.id for job in stored_jobs} == {job.id for job in jobs if job.team == team}
        assert await store.job(forged.id) is None
    finally:
        await store.close()
