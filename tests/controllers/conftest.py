"""The same stories over both stores."""

import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from broker.ports import Store
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from providers.simulated.provider import SimulatedProvider
from tests.controllers.house import House, config, new_state
from tests.support.memory_store.store import MemoryStore


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, postgres_dsn: str) -> AsyncIterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore(SystemClock())
    else:
        made = await PostgresStore.connect(postgres_dsn)
    yield made
    await made.close()


@pytest.fixture
async def house(store: Store) -> AsyncIterator[Callable[..., House]]:
    """Builds a house with the given market."""
    states = []

    def build(cloud: type[SimulatedProvider] = SimulatedProvider, **market: Any) -> House:
        states.append(new_state())
        return House(store=store, config=config(**market), state=states[-1], cloud=cloud)

    yield build
    for state in states:
        shutil.rmtree(state, ignore_errors=True)
