"""Fixtures: one application per test, over each store."""

from collections.abc import AsyncIterator

import pytest

from broker.ports import Store
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.api.harness import Running, memory_blobs, serving
from tests.support.memory_store.store import MemoryStore


@pytest.fixture(params=["memory", "postgres"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Return the dsn of the store under test; None for memory, for which no database is made."""
    return None if request.param == "memory" else str(request.getfixturevalue("postgres_dsn"))


@pytest.fixture
async def store(database: str | None) -> AsyncIterator[Store]:
    if database is None:
        made: Store = MemoryStore(SystemClock())
    else:
        made = await PostgresStore.connect(database)
    yield made
    await made.close()


@pytest.fixture
async def api(store: Store) -> AsyncIterator[Running]:
    async with serving(store, memory_blobs()) as running:
        yield running
