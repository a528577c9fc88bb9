"""One application a test, over each store."""

from collections.abc import AsyncIterator

import pytest

from broker.ports import Store
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.api.harness import Running, memory_blobs, serving
from tests.support.memory_store.store import MemoryStore


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, postgres_dsn: str) -> AsyncIterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore(SystemClock())
    else:
        made = await PostgresStore.connect(postgres_dsn)
    yield made
    await made.close()


@pytest.fixture
async def api(store: Store) -> AsyncIterator[Running]:
    async with serving(store, memory_blobs()) as running:
        yield running
