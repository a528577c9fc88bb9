"""Requests beyond the daemon's capacity are refused at once, and nothing grows."""

import asyncio
from typing import Any

import aiohttp
import pytest

from broker.runtime.clock import SystemClock
from tests.api.harness import memory_blobs, serving
from tests.support.memory_store.store import MemoryStore

AT_ONCE = 3


async def test_calls_beyond_the_concurrency_limit_get_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    come, release = asyncio.Semaphore(0), asyncio.Event()

    async def slow(*_: Any, **__: Any) -> list[Any]:
        come.release()
        await release.wait()
        return []

    async with serving(store, memory_blobs(), requests=AT_ONCE) as api, aiohttp.ClientSession() as session:
        headers = await api.token("me")
        monkeypatch.setattr("tests.support.memory_store.tenant.MemoryTenant.jobs", slow)

        async def jobs() -> tuple[int, str | None]:
            async with session.get(f"{api.url}/v1/jobs", headers=headers) as answer:
                await answer.read()
                return answer.status, answer.headers.get("Retry-After")

        answering = [asyncio.create_task(jobs()) for _ in range(AT_ONCE)]
        for _ in range(AT_ONCE):
            await come.acquire()
        refused = await asyncio.gather(*(jobs() for _ in range(100)))
        assert set(refused) == {(503, "2")}
        async with session.get(f"{api.url}/healthz") as probe:
            assert probe.status == 200
        release.set()
        assert {status for status, _ in await asyncio.gather(*answering)} == {200}
        assert (await jobs())[0] == 200
    await store.close()
