"""The gRPC door over a store in memory."""

from collections.abc import AsyncIterator

import pytest

from broker.runtime.clock import SystemClock
from broker.store.memory.store import MemoryStore
from tests.parity.servers import ApiServers, standing


@pytest.fixture
async def house() -> AsyncIterator[ApiServers]:
    async with standing(MemoryStore(SystemClock()), "grpc", reflects=True) as made:
        yield made
