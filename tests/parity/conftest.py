"""Fixtures: one installation over PostgreSQL, called over HTTP or gRPC."""

from collections.abc import AsyncIterator

import pytest

from broker.store.postgres.store import PostgresStore
from tests.parity.servers import KINDS, ApiServers, standing


@pytest.fixture
async def both(postgres_dsn: str) -> AsyncIterator[ApiServers]:
    """Yield servers with both transports, for steps that name the transport."""
    store = await PostgresStore.connect(postgres_dsn)
    async with standing(store, "grpc") as made:
        yield made
    await store.close()


@pytest.fixture(params=KINDS)
async def servers(request: pytest.FixtureRequest, both: ApiServers) -> ApiServers:
    """Return the servers, for each transport in turn."""
    both.kind = request.param
    return both
