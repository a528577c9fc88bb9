"""One installation over PostgreSQL, entered by either door."""

from collections.abc import AsyncIterator

import pytest

from broker.store.postgres.store import PostgresStore
from tests.doors.house import KINDS, House, standing


@pytest.fixture
async def both(postgres_dsn: str) -> AsyncIterator[House]:
    """For steps that name the door."""
    store = await PostgresStore.connect(postgres_dsn)
    async with standing(store, "grpc") as made:
        yield made
    await store.close()


@pytest.fixture(params=KINDS)
async def house(request: pytest.FixtureRequest, both: House) -> House:
    """Entered by each door in turn."""
    both.kind = request.param
    return both
