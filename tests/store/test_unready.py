"""Readiness of a daemon whose database refuses writes, is damaged, or does not let the controllers claim."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import asyncpg
import pytest

from broker.api.core.readiness import Readiness, unready
from broker.domain.errors import StoreUnavailable
from broker.runtime.clock import SystemClock
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.api.harness import memory_blobs
from tests.conformance.samples import running
from tests.crash.daemon import Daemon

MORE_BLOCKS = "DO $$ BEGIN FOR i IN 1..200 LOOP UPDATE jobs SET due_at = due_at; END LOOP; END $$"
PROMISED_S = 5.0
"""Seconds from a fault to the answer 503."""


async def execute(dsn: str, statement: str) -> str:
    connection = await asyncpg.connect(dsn)
    try:
        return str(await connection.fetchval(statement))
    finally:
        await connection.close()


async def fault(store: PostgresStore) -> str:
    return unready(await Readiness(store, memory_blobs(), SystemClock(), 90.0, lambda: 0.0).check()).get("database", "")


async def test_a_database_that_refuses_writes_makes_the_daemon_unready(postgres_dsn: str) -> None:
    """A standby refuses writes, and so does a managed server whose disk is full."""
    name = await execute(postgres_dsn, "SELECT current_database()")
    await execute(postgres_dsn, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    store = await PostgresStore.connect(postgres_dsn)
    try:
        with pytest.raises(StoreUnavailable):
            await store.ping()
        assert "read-only transaction" in await fault(store)
    finally:
        await store.close()


@asynccontextmanager
async def server_in(folder: Path) -> AsyncIterator[EmbeddedPostgres]:
    async with await EmbeddedPostgres.start(folder, durable=False) as server:
        yield server


@pytest.mark.parametrize(("table", "block"), [("jobs", 0), ("jobs", 2), ("attempts", 0), ("ledger", 0)])
async def test_a_damaged_page_makes_the_daemon_unready(table: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No query reads the row: a job that has ended is neither claimed nor listed."""
    monkeypatch.setattr("broker.store.postgres.store.CHECKED_BLOCKS", 1)
    folder = Path(tempfile.mkdtemp(prefix="gb-"))
    try:
        async with server_in(folder) as server:
            await migrate(server.dsn)
            store = await PostgresStore.connect(server.dsn)
            await running(store)
            await execute(server.dsn, MORE_BLOCKS)
            assert await fault(store) == ""
            await store.close()
            path = await execute(server.dsn, f"SELECT pg_relation_filepath('{table}')")
        damage(folder, path, block)
        async with server_in(folder) as server:
            store = await PostgresStore.connect(server.dsn)
            faults = [await fault(store) for _ in range(block + 1)]
            assert faults[:block] == [""] * block
            assert "the database is damaged" in faults[block]
            assert f"invalid page in block {block}" in faults[block]
            await store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def damage(folder: Path, path: str, block: int) -> None:
    (file,) = folder.glob(f"**/{path}")
    with file.open("r+b") as pages:
        pages.seek(8192 * block + 4000)
        pages.write(b"\xff" * 4000)


@pytest.fixture
async def daemon(postgres_dsn: str) -> AsyncIterator[Daemon]:
    daemon = Daemon(database_url=postgres_dsn)
    await daemon.start()
    yield daemon
    await daemon.remove()


async def test_claims_that_fail_make_the_daemon_unready_within_five_seconds(daemon: Daemon, postgres_dsn: str) -> None:
    client = json.loads((daemon.home / "client.json").read_text())
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client['token']}"}) as http:

        async def broker_is(word: str) -> str:
            async with asyncio.timeout(PROMISED_S):
                while True:
                    async with http.get(f"{client['url']}/readyz") as answer:
                        text = await answer.text()
                    if word in text:
                        return text
                    await asyncio.sleep(0.1)

        await broker_is('"broker":"ok"')
        await execute(postgres_dsn, "ALTER TABLE attempts RENAME COLUMN lease_owner TO other")
        assert "claims failing: " in await broker_is("claims failing")
        await execute(postgres_dsn, "ALTER TABLE attempts RENAME COLUMN other TO lease_owner")
