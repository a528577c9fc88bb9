"""Expensive requests are bounded, run outside the event loop, and get 503 after a deadline."""

import gc
import threading
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.api.core.body_limits import MAX_TEXT_BYTES, MAX_VALUES, check_json_values
from broker.domain.errors import InvalidInput
from broker.runtime.clock import SystemClock
from broker.runtime.cpu_threads import CpuThreads
from tests.api.harness import Running, memory_blobs, serving, spec
from tests.support.memory_store.store import MemoryStore

TIMEOUT_S = 60.0


@pytest.fixture
async def api() -> AsyncIterator[Running]:
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as running:
        yield running


@pytest.mark.parametrize(
    "place",
    ["broker.api.service.quotes.quote", "broker.preflight.check.check", "broker.preflight.model_lookup.task_shape"],
)
async def test_other_calls_are_answered_while_a_quote_computes(
    api: Running, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    entered, release = threading.Event(), threading.Event()

    def compute(*_: Any, **__: Any) -> Any:
        entered.set()
        release.wait(TIMEOUT_S)

    monkeypatch.setattr(place, compute)
    monkeypatch.setattr(api.service.quotes, "threads", CpuThreads(deadline_s=0.2))
    me, other = await api.token("ada"), await api.token("bob", team="blue")
    body = spec((await api.upload(me))["ref"])
    try:
        async with api.http.post(f"{api.url}/v1/quotes", headers=me, json=body) as answer:
            assert entered.is_set()
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
        await api.call("GET", "/v1/me", other, 200)
    finally:
        release.set()


@pytest.mark.parametrize(
    "body",
    [
        b'{"labels":{' + b",".join(b'"k%d":1' % i for i in range(MAX_VALUES + 1)) + b"}}",
        b'{"secrets":[' + b",".join([b"1"] * (MAX_VALUES + 1)) + b"]}",
        b'{"labels":{' + b",".join([b'"\\\\":"\\""'] * (MAX_VALUES + 1)) + b"}}",
        b'{"labels":[' + b"[]," * (MAX_VALUES + 1) + b"1]}",
    ],
)
async def test_a_body_of_too_many_values_is_refused_before_it_is_validated(api: Running, body: bytes) -> None:
    """4 MB of wrong keys took 5 s on the event loop."""
    headers = {**await api.token("ada"), "Content-Type": "application/json"}
    refused = await api.call("POST", "/v1/quotes", headers, 422, data=body)
    assert refused["detail"] == f"body: has more than {MAX_VALUES} values; send fewer"


def test_a_long_text_is_not_many_values() -> None:
    check_json_values(b'{"prompt":"' + b'a, \\"b\\", ' * MAX_VALUES + b'"}')
    with pytest.raises(InvalidInput):
        check_json_values(b"[" + b"1," * MAX_VALUES + b"1]")


@pytest.mark.parametrize(
    "body",
    [
        b'{"cap_usd":"' + b"9" * (MAX_TEXT_BYTES + 1) + b'"}',
        b'{"' + b"k" * (MAX_TEXT_BYTES + 1) + b'":1}',
        b'{"name":"' + b'\\"' * MAX_TEXT_BYTES + b'"}',
    ],
)
async def test_a_body_with_a_huge_text_is_refused_unvalidated(api: Running, body: bytes) -> None:
    headers = {**await api.token("ada"), "Content-Type": "application/json"}
    refused = await api.call("POST", "/v1/quotes", headers, 422, data=body)
    assert refused["detail"] == f"body: has a text of more than {MAX_TEXT_BYTES} bytes; send less, and upload files"


def test_the_longest_valid_text_is_accepted_escaped() -> None:
    check_json_values(b'{"code":"' + b"\\ud83d\\ude00" * 32_768 + b'"}')


async def test_a_refused_body_is_freed_without_garbage_collection(api: Running) -> None:
    """The circle of error, traceback and frame kept 4 MB a refusal, until a daemon of 1 GiB had no memory."""
    headers = {**await api.token("ada"), "Content-Type": "application/json"}
    body = b'{"cap_usd":"' + b"9" * (MAX_TEXT_BYTES - 100) + b'"}'
    await api.call("POST", "/v1/quotes", headers, 422, data=body)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            await api.call("POST", "/v1/quotes", headers, 422, data=body)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before < 2 * len(body)


async def test_a_fault_repeats_no_long_input(api: Running) -> None:
    headers = {**await api.token("ada"), "Content-Type": "application/json"}
    long = "2" * 300_000
    answer = await api.call("POST", "/v1/quotes", headers, 422, json={"deadline": long, "name": long, long: 1})
    assert len(str(answer)) < 5000
