"""Migration and restored backups of a database whose owner is not a superuser."""

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from broker.domain.tenancy import Tenant
from broker.store.embedded.server import EmbeddedPostgres, find_bindir
from broker.store.migrate import MIGRATIONS, MigrationError, load, migrate
from broker.store.postgres.store import PostgresStore
from tests.conformance.samples import running

OPERATOR = Tenant(team="default", owner="ann", token_id="tok1", operator=True)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[EmbeddedPostgres]:
    """Yield a server of its own, because roles belong to a whole server."""
    folder = Path(tempfile.mkdtemp(prefix="gb-"))
    try:
        async with await EmbeddedPostgres.start(folder, durable=False) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def admin(server: EmbeddedPostgres) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """Yield the server's superuser, and two roles without superuser rights, each with an empty database."""
    connection = await asyncpg.connect(server.admin_dsn)
    await connection.execute("DROP ROLE IF EXISTS gpubroker_api")
    await connection.execute("CREATE ROLE maker LOGIN CREATEROLE; CREATE ROLE plain LOGIN")
    for role in ("maker", "plain"):
        await connection.execute(f"CREATE DATABASE {role} OWNER {role}")
    yield connection
    for role in ("maker", "plain"):
        await connection.execute(f"DROP DATABASE {role} WITH (FORCE)")
    await connection.execute("DROP ROLE IF EXISTS gpubroker_api")
    await connection.execute("DROP ROLE maker, plain")
    await connection.close()


@pytest.fixture
async def dsn(server: EmbeddedPostgres, admin: object) -> str:
    """Return the URL of an empty database whose owner may create roles."""
    return as_role(server, "maker")


def as_role(server: EmbeddedPostgres, role: str) -> str:
    return server.dsn.replace("//gpubroker@/gpubroker?", f"//{role}@/{role}?")


async def run(program: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        find_bindir() / program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_dump_by_superuser_restores_for_the_role(
    server: EmbeddedPostgres, admin: "asyncpg.Connection[asyncpg.Record]", dsn: str, tmp_path: Path
) -> None:
    """Back up and restore as docs/guide/operating.md describes: the role itself is subject to row-level security."""
    assert await migrate(dsn) == [migration.name for migration in load(MIGRATIONS).values()]
    store = await PostgresStore.connect(dsn)
    try:
        attempt, job = await running(store)
        entries = await store.ledger(job.id)
    finally:
        await store.close()
    await run(
        "pg_dump", "--format=custom", f"--file={tmp_path}/db.dump", server.admin_dsn.replace("/gpubroker?", "/maker?")
    )
    await admin.execute("CREATE DATABASE restored OWNER maker")
    there = dsn.replace("/maker?", "/restored?")
    try:
        await run(
            "pg_restore", "--exit-on-error", f"--dbname={server.admin_dsn.replace('/gpubroker?', '/restored?')}",
            f"{tmp_path}/db.dump",
        )  # fmt: skip
        assert await migrate(there) == []
        restored = await PostgresStore.connect(there)
        try:
            assert await restored.ledger(job.id) == entries
            assert await restored.attempts(job.id) == [attempt]
            assert await restored.as_tenant(OPERATOR).job(job.id) == job
        finally:
            await restored.close()
    finally:
        await admin.execute("DROP DATABASE restored WITH (FORCE)")


@pytest.mark.parametrize("exists", [False, True], ids=["no such role", "a role of another owner"])
async def test_error_for_a_role_without_createrole_gives_statements_that_work(
    server: EmbeddedPostgres, admin: "asyncpg.Connection[asyncpg.Record]", exists: bool
) -> None:
    if exists:
        await admin.execute("CREATE ROLE gpubroker_api NOLOGIN")
    with pytest.raises(MigrationError, match=re.escape("ask an administrator to run: ")) as refused:
        await migrate(as_role(server, "plain"))
    message = str(refused.value)
    assert "\n" not in message
    (statements,) = re.findall(r"ask an administrator to run: (.*;);", message)
    for statement in statements.split(";")[exists:-1]:  # without CREATE ROLE if the role exists
        await admin.execute(statement)
    assert "0001_initial.sql" in await migrate(as_role(server, "plain"))
    store = await PostgresStore.connect(as_role(server, "plain"))
    await store.close()
