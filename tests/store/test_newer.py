"""A running broker whose database a newer one migrates."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from broker.api.core.readiness import Readiness, unready
from broker.domain.errors import SchemaNewer
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.api.harness import memory_blobs
from tests.crash.daemon import Daemon

NEWER = "INSERT INTO schema_migrations (version, name, sha256) VALUES (9999, '9999_later.sql', '')"


async def migrated(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(NEWER)
    await connection.close()


async def test_a_newer_schema_shows_in_the_heartbeat_and_in_readiness(postgres_dsn: str) -> None:
    store = await PostgresStore.connect(postgres_dsn)
    ready = Readiness(store, memory_blobs(), SystemClock(), 90.0, lambda: 0.0)
    assert "database" not in unready(await ready.check())
    await migrated(postgres_dsn)
    with pytest.raises(SchemaNewer, match=r"newer \(9999_later.sql\) than this gpubroker \(\d{4}_\w+.sql\): upgrade"):
        await store.ping()
    assert "newer (9999_later.sql)" in unready(await ready.check())["database"]
    await store.close()


@pytest.fixture
async def daemon(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    monkeypatch.setenv("GPUBROKER_DATABASE_URL", postgres_dsn)
    daemon = Daemon()
    await daemon.start()
    yield daemon
    await daemon.remove()


async def test_a_newer_schema_ends_the_daemon_with_its_own_exit_code(daemon: Daemon, postgres_dsn: str) -> None:
    assert daemon.process is not None
    await migrated(postgres_dsn)
    async with asyncio.timeout(300):
        assert await daemon.process.wait() == 9
    told = [line for line in daemon.log().splitlines() if "newer (9999_later.sql)" in line]
    assert sum("; stopping, running machines keep training" in line for line in told) == 1
    assert "Traceback" not in daemon.log()
    with pytest.raises(AssertionError, match=r"newer \(9999_later.sql\)"):
        await daemon.start()
    assert await daemon.process.wait() == 9
