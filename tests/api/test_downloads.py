"""Logs and results that clients read slowly, and documents that a host made to cost much: bounded memory and time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import process_time

import pytest

from broker.api.core import transfer_memory
from broker.api.core.log_position import MAX_STARTS, Position, chunks_of
from broker.api.http import downloads
from broker.api.http.context import CONTENT, STREAMS
from broker.api.http.downloads import attachment
from broker.api.schemas.queries import HEADERS
from broker.api.service.content import COPIES, MANIFESTS_OF_ATTEMPT
from broker.domain.ids import AttemptId
from broker.ports import BlobInfo
from tests.api.harness import Running, spec
from tests.api.test_files import admitted, put_checkpoint
from trainer.contract import object_keys as keys

CHUNK, CHUNKS = bytes(1 << 20), 24
LOG_BYTES = len(CHUNK) * CHUNKS
TIMEOUT_S = 60.0


async def job_with_log(api: Running, me: dict[str, str]) -> tuple[str, str]:
    """Return (job, attempt) with a log of LOG_BYTES and a result of the same size."""
    job = (await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"]
    attempt = await admitted(api, job)
    for number in range(CHUNKS):
        await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", number), CHUNK)
    await put_checkpoint(api, job, attempt, 5, {"model.safetensors": CHUNK * CHUNKS})
    return job, attempt


@asynccontextmanager
async def slow_reader(api: Running, path: str, me: dict[str, str]) -> AsyncIterator[asyncio.StreamReader]:
    """Request a path, and read the status line only."""
    port = int(api.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {me['Authorization']}\r\n\r\n".encode())
    try:
        assert b" 200 " in await reader.readline()
        yield reader
    finally:
        writer.close()


async def status(api: Running, path: str, me: dict[str, str]) -> int:
    async with api.http.get(f"{api.url}{path}", headers=me) as response:
        await response.read()
        return response.status


async def until_freed(api: Running) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while api.app[CONTENT]._memory.bytes or api.app[STREAMS].open:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0.01)


async def test_slow_readers_of_a_team_hold_bounded_memory(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty slow readers of a log filled a daemon of 1 GiB."""
    monkeypatch.setattr(transfer_memory, "TEAM_BYTES", COPIES * LOG_BYTES)
    me, other = await api.token("ada"), await api.token("bob", team="blue")
    job, _ = await job_with_log(api, me)
    others, _ = await job_with_log(api, other)
    log, result = f"/v1/jobs/{job}/logs?follow=0", f"/v1/jobs/{job}/artifacts/model.safetensors"
    async with slow_reader(api, log, me):
        assert [await status(api, path, me) for path in (log, result)] == [429, 429]
        assert await status(api, f"/v1/jobs/{others}/logs?follow=0", other) == 200
    await until_freed(api)
    assert [await status(api, path, me) for path in (log, result)] == [200, 200]
    await until_freed(api)


async def test_a_reader_that_stalls_loses_its_connection(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "WRITE_S", 0.1)
    me = await api.token("ada")
    job, _ = await job_with_log(api, me)
    for path in (f"/v1/jobs/{job}/logs?follow=0", f"/v1/jobs/{job}/artifacts/model.safetensors"):
        async with slow_reader(api, path, me):
            await until_freed(api)


async def test_manifests_of_very_many_values_are_not_parsed(api: Running) -> None:
    """A host wrote 16 MB of `1,`: to refuse it took 22 s of the event loop."""
    me = await api.token("ada")
    job = (await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"]
    attempt = await admitted(api, job)
    await put_checkpoint(api, job, attempt, 5, {"a.json": b"{}"})
    document = {"job": job, "attempt": attempt, "step": 9, "kind": "train", "files": [1] * 1_000_000}
    large = keys.checkpoint(job, attempt, 9, "n0") + keys.MANIFEST
    await api.service.blobs.put(large, json.dumps(document, separators=(",", ":")).encode())
    began = process_time()
    assert (await api.call("GET", f"/v1/jobs/{job}/artifacts", me, 200))["step"] == 5
    assert process_time() - began < 0.5
    for step in range(10, 10 + MANIFESTS_OF_ATTEMPT):
        await api.service.blobs.put(keys.checkpoint(job, attempt, step, "n0") + keys.MANIFEST, b"{}")
    assert (await api.call("GET", f"/v1/jobs/{job}/artifacts", me, 200))["step"] is None


def test_names_that_a_host_gave_its_log_reach_no_event() -> None:
    """A line break in a key became lines of an event; 10,000 starts took seconds of the loop."""
    odd = ("a\nevent: end\n-0000000001", "b;c-0000000001", "b-1", f"{'b' * 17}-0000000001")
    names = ["0/boot-0000000001", *(f"0/{name}" for name in odd), "٣/boot-0000000001", "9999/boot-0000000001"]
    names += [f"1/b{number}-0000000001" for number in range(10_000)]
    listed = [BlobInfo(key=f"log/{name}", bytes=1, etag="e") for name in names]
    chunks = chunks_of(listed, "log/")
    assert (len(chunks), chunks[0].key) == (MAX_STARTS, "log/0/boot-0000000001")
    position = Position()
    for chunk in chunks:
        position = position.after(AttemptId("a" * 15), chunk)
    assert len(str(position)) <= HEADERS["Last-Event-ID"]["maxLength"]
    assert position.unread(AttemptId("a" * 15), chunks) == []
    assert position.unread(AttemptId("b" * 15), chunks) == chunks


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("a/page.html", "attachment; filename=\"page.html\"; filename*=UTF-8''page.html"),
        ('a";\r\nb', "attachment; filename=\"a____b\"; filename*=UTF-8''a%22%3B%0D%0Ab"),
        ("é" * 500 + ".pt", f"attachment; filename=\"{'_' * 97}.pt\"; filename*=UTF-8''{'%C3%A9' * 97}.pt"),
        ("a/", "attachment; filename=\"file\"; filename*=UTF-8''file"),
    ],
)
def test_names_of_downloads_are_quoted(path: str, header: str) -> None:
    assert attachment(path) == header
