"""Rigs over both stores."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.ports import Store
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import BrokerRig, RigBuilder, config, new_state
from tests.support.rig.simulated_cloud import CloudFaults, SimulatedCloud


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, postgres_dsn: str) -> AsyncIterator[Store]:
    opened: Store
    if request.param == "memory":
        opened = MemoryStore(SystemClock())
    else:
        opened = await PostgresStore.connect(postgres_dsn)
    yield opened
    await opened.close()


@pytest.fixture
async def build_rig(store: Store) -> AsyncIterator[RigBuilder]:
    """Builder of rigs on the store; their folders are removed after the test."""
    states = []

    def build(
        cloud: type[SimulatedCloud] = SimulatedCloud, *, cloud_faults: CloudFaults | None = None, **market: Any
    ) -> BrokerRig:
        states.append(new_state())
        return BrokerRig(
            store=store, config=config(**market), state=states[-1], cloud=cloud, faults=cloud_faults or CloudFaults()
        )

    yield build
    for state in states:
        shutil.rmtree(state, ignore_errors=True)
