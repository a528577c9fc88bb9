"""Events and logs are complete, without repeats, and end when the job is terminal."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import aiohttp
import pytest

from broker.api.service import content
from broker.api.service.content import CHUNK_BYTES
from broker.domain.ids import JobId
from broker.domain.job import Event, Job, JobState
from broker.ports import Change
from tests.api.harness import SEEN, Running, spec
from tests.api.test_files import admitted
from trainer.contract import object_keys as keys


@dataclass
class Stream:
    """Reader of a stream, like a browser's EventSource."""

    response: aiohttp.ClientResponse

    async def next(self) -> dict[str, str]:
        """Return the next message; empty at the end."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(300):
            async for raw in self.response.content:
                line = raw.decode().rstrip("\n")
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif not line and fields:
                    return fields
        return {}

    async def rest(self) -> list[dict[str, str]]:
        messages = []
        while message := await self.next():
            messages.append(message)
        return messages


async def opened(api: Running, path: str, headers: Mapping[str, str]) -> Stream:
    response = await api.http.get(api.url + path, headers=headers)
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    return Stream(response)


async def submitted(api: Running, me: dict[str, str]) -> str:
    return str((await api.call("POST", "/v1/jobs", me, 202, json=spec((await api.upload(me))["ref"])))["id"])


async def happens(api: Running, job: str, kind: str, *, end: JobState | None = None) -> None:
    """Write an event, and the job's end, as a controller does."""
    store = api.service.store
    row = await store.job(JobId(job))
    assert row is not None
    if end is None:
        await store.raise_cap(row.id, row.cap_usd + 1, Event(job_id=row.id, kind=kind, message=kind))
        return
    claimed: Job = (await store.claim_jobs([JobState.QUEUED], owner="t", lease_s=60, limit=1))[0]
    after = replace(claimed, state=end, finished_at=SEEN)
    event = Event(job_id=row.id, kind=kind, message=kind)
    assert all(await store.apply([Change(job=(claimed, after), events=(event,))]))


async def test_a_follower_gets_every_event_once_and_then_the_end(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    stream = await opened(api, f"/v1/jobs/{job}/events", me)
    assert (await stream.next())["event"] == "job.submitted"
    for i in range(5):
        await happens(api, job, f"test.{i}")
    await happens(api, job, "job.failed", end=JobState.FAILED)
    rest = await stream.rest()
    assert [m["event"] for m in rest] == [*(f"test.{i}" for i in range(5)), "job.failed", "end"]
    assert [m["id"] for m in rest[:-1]] == ["2", "3", "4", "5", "6", "7"]
    assert json.loads(rest[-1]["data"]) == {"state": "failed", "reason": ""}


async def test_a_follower_that_comes_back_misses_and_repeats_nothing(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    for i in range(6):
        await happens(api, job, f"test.{i}")
    ids: list[str] = []
    last = ""
    for _ in range(3):
        stream = await opened(api, f"/v1/jobs/{job}/events", me | {"Last-Event-ID": last} if last else me)
        for _ in range(2):
            message = await stream.next()
            ids.append(message["id"])
            last = message["id"]
        stream.response.close()
    await happens(api, job, "job.failed", end=JobState.FAILED)
    stream = await opened(api, f"/v1/jobs/{job}/events?after={last}", me)
    ids += [m["id"] for m in await stream.rest() if "id" in m]
    assert ids == [str(i) for i in range(1, 9)]


async def test_a_wrong_position_is_refused(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    for feed, last in (("events", "x"), ("logs", "a;b-c")):
        refused = await api.call("GET", f"/v1/jobs/{job}/{feed}", me | {"Last-Event-ID": last}, 422)
        assert refused["errors"][0]["field"] == "Last-Event-ID"


async def test_logs_follow_across_reconnects_and_several_nodes(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    attempt = await admitted(api, job)
    blobs = api.service.blobs
    await blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"zero\n")
    await blobs.put(keys.log_chunk(attempt, 1, "boot", 0), b"node one\n")
    path = f"/v1/jobs/{job}/logs"
    stream = await opened(api, path, me)
    first = [await stream.next(), await stream.next()]
    assert [json.loads(m["data"]) for m in first] == [
        {"attempt": 1, "node": 0, "text": "zero\n"},
        {"attempt": 1, "node": 1, "text": "node one\n"},
    ]
    stream.response.close()
    await blobs.put(keys.log_chunk(attempt, 0, "boot", 1), "größe\n".encode())
    stream = await opened(api, path, me | {"Last-Event-ID": first[-1]["id"]})
    assert json.loads((await stream.next())["data"])["text"] == "größe\n"
    stream = await opened(api, path, me | {"Last-Event-ID": first[0]["id"]})
    assert json.loads((await stream.next())["data"])["text"] == "größe\n"
    assert json.loads((await stream.next())["data"])["text"] == "node one\n"
    stream.response.close()


async def test_logs_at_once_are_plain_text_of_the_chosen_attempt(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    path = f"{api.url}/v1/jobs/{job}/logs?follow=0"
    async with api.http.get(path, headers=me) as response:
        assert (response.status, await response.text()) == (200, "")
    attempt = await admitted(api, job)
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"a\n")
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 1), b"b\n")
    async with api.http.get(path + "&attempt=1", headers=me) as response:
        assert response.content_type == "text/plain"
        assert await response.text() == "a\nb\n"
    missing = await api.call("GET", f"/v1/jobs/{job}/logs?attempt=7", me, 404)
    assert "no attempt 7" in missing["detail"]


async def test_the_log_of_a_job_that_never_started_ends_with_it(api: Running) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    stream = await opened(api, f"/v1/jobs/{job}/logs", me)
    await happens(api, job, "job.failed", end=JobState.FAILED)
    assert [m["event"] for m in await stream.rest()] == ["end"]


async def test_log_chunks_that_a_host_made_too_large_are_named_and_not_read(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await api.token("ada")
    job = await submitted(api, me)
    attempt = await admitted(api, job)
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"first\n")
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 1), bytes(CHUNK_BYTES + 1))
    await api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 2), b"last\n")
    path = f"{api.url}/v1/jobs/{job}/logs?follow=0"
    async with api.http.get(path, headers=me) as response:
        first, note, last = (await response.text()).splitlines()
        assert response.headers["Content-Disposition"].startswith(f'attachment; filename="{job}.log"')
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert (first, last) == ("first", "last")
    assert f"has {CHUNK_BYTES + 1} bytes, more than the {CHUNK_BYTES} that are read" in note
    stream = await opened(api, f"/v1/jobs/{job}/logs", me)
    texts = [json.loads((await stream.next())["data"])["text"] for _ in range(3)]
    assert (texts[0], texts[2], "left out" in texts[1]) == ("first\n", "last\n", True)
    stream.response.close()
    monkeypatch.setattr(content, "LOG_BYTES", 3)
    async with api.http.get(path, headers=me) as response:
        assert await response.text() == "(only the last 5 bytes of this log are shown)\nlast\n"
