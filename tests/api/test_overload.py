"""Requests beyond the daemon's capacity are refused at once, and nothing grows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from broker.api.core import request_slots
from broker.api.core.problems import Overloaded, TooMany
from broker.api.core.request_slots import LARGE_BYTES, DaemonSlots
from broker.api.core.stream_limits import StreamLimits
from broker.api.http.context import AUTH, STREAMS
from broker.runtime.clock import SystemClock
from tests.api.harness import Running, memory_blobs, serving
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
        monkeypatch.setattr(request_slots, "WAIT_S", 0.0)
        refused = await asyncio.gather(*(jobs() for _ in range(100)))
        assert set(refused) == {(503, "2")}
        async with session.get(f"{api.url}/healthz") as probe:
            assert probe.status == 200
        release.set()
        assert {status for status, _ in await asyncio.gather(*answering)} == {200}
        assert (await jobs())[0] == 200
    await store.close()


async def test_a_call_in_a_burst_waits_for_a_slot() -> None:
    """One call of another team got 503 in the instant in which 512 slow bodies arrived."""
    slots, begun, end = DaemonSlots(1, lambda: 0), asyncio.Semaphore(0), asyncio.Semaphore(0)
    answered: list[int] = []

    async def call(number: int) -> None:
        async with slots.slot():
            begun.release()
            await end.acquire()
            answered.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(4)]
    await begun.acquire()
    calls[1].cancel()  # Its client leaves while it waits.
    await asyncio.wait((calls[1],))
    calls[0].cancel()  # Its client leaves in the moment of the answer; the slot goes to the next call.
    for _ in calls[2:]:
        await begun.acquire()
        end.release()
    await asyncio.gather(*calls, return_exceptions=True)
    assert answered == [2, 3]


async def test_a_slot_granted_to_a_client_that_left_is_not_lost() -> None:
    slots = DaemonSlots(1, lambda: 0)
    first, second = slots.slot(), slots.slot()
    await first.__aenter__()
    waiting = asyncio.ensure_future(second.__aenter__())
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)  # grants the slot
    waiting.cancel()
    await asyncio.wait((waiting,))
    async with asyncio.timeout(10), slots.slot():
        pass


async def test_an_opened_stream_leaves_its_slot_to_a_waiting_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_slots, "WAIT_S", 0.0)
    streams = 0
    slots = DaemonSlots(1, lambda: streams)
    async with slots.slot():
        with pytest.raises(Overloaded, match="1 requests are being answered already"):
            async with slots.slot():
                pass
        streams = 1
        async with slots.slot():
            pass


async def test_calls_beyond_those_that_may_wait_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_slots, "WAIT_S", 600.0)
    monkeypatch.setattr(request_slots, "MAX_WAITING", 2)
    slots = DaemonSlots(1, lambda: 0)
    async with slots.slot():
        waiting = [asyncio.ensure_future(slots.slot().__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests are waiting already"):
            async with slots.slot():
                pass
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)


JSON, FORM = "application/json", "application/x-www-form-urlencoded"


@asynccontextmanager
async def slow_post(
    api: Running, path: str, kind: str, me: dict[str, str], size: int = 100
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request's head and one byte of its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rsplit(":", 1)[1]))
    lines = [f"{name}: {value}" for name, value in {**me, "Content-Type": kind, "Content-Length": size}.items()]
    writer.write("\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", "{"]).encode())
    try:
        yield reader
    finally:
        writer.close()


async def line_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        return await reader.readline()


async def test_slow_bodies_without_a_token_leave_places(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 connections that each sent a byte to /v1/slack made the daemon answer 503 to all, without a token."""
    monkeypatch.setattr(request_slots, "ANONYMOUS_BODIES", 2)
    async with AsyncExitStack() as held:
        readers = [await held.enter_async_context(slow_post(api, "/v1/slack", FORM, {})) for _ in range(3)]
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(line_of(reader)) for reader in readers], return_when=asyncio.FIRST_COMPLETED
        )
        assert [b" 503 " in task.result() for task in done] == [True]
        await api.call("GET", "/v1/me", await api.token("ada"), 200)


@pytest.mark.parametrize(("size", "limit"), [(100, "REQUESTS_OF_TEAM"), (LARGE_BYTES + 1, "LARGE_OF_TEAM")])
async def test_slow_bodies_of_a_team_leave_places_and_memory(
    api: Running, monkeypatch: pytest.MonkeyPatch, size: int, limit: str
) -> None:
    monkeypatch.setattr(request_slots, limit, 2)
    me, other = await api.token("ada"), await api.token("bob", team="blue")
    async with AsyncExitStack() as held:
        readers = [await held.enter_async_context(slow_post(api, "/v1/quotes", JSON, me, size)) for _ in range(3)]
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(line_of(reader)) for reader in readers], return_when=asyncio.FIRST_COMPLETED
        )
        assert [b" 429 " in task.result() for task in done] == [True]
        await api.call("GET", "/v1/me", me, 429 if limit == "REQUESTS_OF_TEAM" else 200)
        await api.call("GET", "/v1/me", other, 200)
        async with slow_post(api, "/v1/quotes", JSON, other, size) as reader:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await reader.readline()


async def test_streams_of_a_team_leave_half_to_others() -> None:
    limits = StreamLimits(per_token=2, per_team=2, total=4)
    async with serving(MemoryStore(SystemClock()), memory_blobs(), limits=limits) as api, AsyncExitStack() as held:
        streams = api.app[STREAMS]
        callers = [await caller_of(api, f"user{n}", "red") for n in range(3)]
        for caller, header in callers[:2]:
            await held.enter_async_context(streams.slot(caller, header))
        with pytest.raises(TooMany, match="this team has as many streams"):
            await held.enter_async_context(streams.slot(*callers[2]))
        await held.enter_async_context(streams.slot(*await caller_of(api, "bob", "blue")))


async def caller_of(api: Running, owner: str, team: str) -> tuple[Any, str]:
    header = (await api.token(owner, team=team))["Authorization"]
    return await api.app[AUTH].caller(header, "read"), header
