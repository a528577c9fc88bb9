"""The daemon's application over PostgreSQL, and a browser without JavaScript."""

from collections.abc import AsyncIterator

import pytest

from broker.store.postgres.store import PostgresStore
from tests.api.harness import Running, memory_blobs, serving
from tests.web.visitor import Visitor


@pytest.fixture
async def api(postgres_dsn: str) -> AsyncIterator[Running]:
    store = await PostgresStore.connect(postgres_dsn)
    async with serving(store, memory_blobs()) as running:
        yield running
    await store.close()


@pytest.fixture
async def ada(api: Running) -> AsyncIterator[Visitor]:
    """Yield a browser that is signed in as ada."""
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token("ada"))
        yield visitor
