"""Rigs over both stores."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.lifecycle import transitions
from broker.ports import Store
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import BrokerRig, RigBuilder, config, new_state
from tests.support.rig.simulated_cloud import CloudFaults, SimulatedCloud

BACK_OFF_SHARE = 0.05
"""Share of the product's back-off after a failed attempt: 0.05 or 0.25 s before the second one."""


@pytest.fixture(autouse=True)
def _quick_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll launches as often as the rig's other rows, and retry soon."""
    monkeypatch.setattr("broker.lifecycle.decisions.launch_decision.CREATE_POLL_S", 0.02)
    of_product = transitions.back_off_s
    monkeypatch.setattr(transitions, "back_off_s", lambda reason, used: BACK_OFF_SHARE * of_product(reason, used))


@pytest.fixture(params=["memory", "postgres"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Return the dsn of the store under test; None for memory, for which no database is made."""
    return None if request.param == "memory" else str(request.getfixturevalue("postgres_dsn"))


@pytest.fixture
async def store(database: str | None) -> AsyncIterator[Store]:
    opened: Store
    if database is None:
        opened = MemoryStore(SystemClock())
    else:
        opened = await PostgresStore.connect(database)
    yield opened
    await opened.close()


@pytest.fixture
async def build_rig(store: Store) -> AsyncIterator[RigBuilder]:
    """Yield a builder of rigs on the store; their folders are removed after the test."""
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
