"""The gRPC API over a store in memory."""

from collections.abc import AsyncIterator

import pytest

from broker.runtime.clock import SystemClock
from tests.parity.servers import ApiServers, standing
from tests.support.memory_store.store import MemoryStore


@pytest.fixture
async def servers() -> AsyncIterator[ApiServers]:
    async with standing(MemoryStore(SystemClock()), "grpc", reflects=True) as running:
        yield running
