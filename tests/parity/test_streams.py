"""Open streams of either transport: limited in number, released on every exit, and ended with their token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import aiohttp
import grpc
import pytest

from broker.api.core.stream_limits import StreamLimits
from broker.api.http.context import AUTH, STREAMS
from broker.api.proto.gpubroker.v1 import artifact_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import artifact_service_pb2_grpc as stubs
from broker.domain.errors import StoreUnavailable
from broker.runtime.clock import SystemClock
from tests.api.harness import CSV, LIMITS
from tests.api.test_feeds import happens
from tests.api.test_files import admitted, put_checkpoint
from tests.conformance.samples import ManualClock
from tests.parity.grpc_transport import lost_by_the_client, refused
from tests.parity.servers import KINDS, ApiServers, Kind, standing
from tests.parity.test_jobs import good
from tests.parity.transport import Refused, Transport
from tests.support.memory_store.store import MemoryStore
from trainer.contract import object_keys as keys

GUARD_S = 300
"""Seconds after which a wait is a hang, for a busy machine."""
BIG = 48 * 1024**2
"""Bytes, more than the buffers of two sockets hold while the client does not read."""


@asynccontextmanager
async def narrow(kind: Kind, limits: StreamLimits, **how: Any) -> AsyncIterator[tuple[ApiServers, str]]:
    """Yield (servers with these limits, a job of a member whose token is not checked again)."""
    async with standing(MemoryStore(SystemClock()), kind, limits=limits, **how) as servers, asyncio.timeout(GUARD_S):
        operator = await servers.transport("olga")
        job, _ = await operator.submit(await good(operator))
        yield servers, job.id


async def following(transport: Transport, job: str) -> Any:
    """Return an open stream of events."""
    stream = transport.events(job, timeout_s=GUARD_S)
    await anext(stream)
    return stream


async def told(stream: Any) -> Refused:
    with pytest.raises(Refused) as error:
        await anext(stream)
    return error.value


async def until(step: Callable[[], Any]) -> Any:
    """Repeat `step` until it is not refused because of open streams, and return its result."""
    while True:
        try:
            return await step()
        except Refused as error:
            if error.kind != "limited":
                raise


# ------------------------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize("kind", KINDS)
async def test_one_token_has_so_many_open_and_all_together_so_many(kind: Kind) -> None:
    async with narrow(kind, StreamLimits(per_token=2, total=3)) as (servers, job):
        ada, bob, eve = [await servers.transport(owner) for owner in ("ada", "bob", "eve")]
        mine = [await following(ada, job), await following(ada, job)]
        for third in (ada.events(job), ada.logs(job)):
            refusal = await told(third)
            assert (refusal.kind, refusal.after_s) == ("limited", 5)
            assert refusal.text == "this token has as many streams open as it may, 2; end one of them"
        assert (await ada.job(job)).state == "queued"
        with pytest.raises(Refused, match="limited"):
            await ada.upload(CSV.encode(), name="words.csv")
        theirs = await following(bob, job)
        refusal = await told(eve.events(job))
        assert refusal.text == "as many streams are open as may be, 3; try again when one has ended"
        await mine.pop().aclose()
        mine.append(await until(lambda: following(eve, job)))
        for stream in (*mine, theirs):
            await stream.aclose()


async def test_both_apis_count_together() -> None:
    async with narrow("http", StreamLimits(per_token=1)) as (servers, job):
        authorization = (await servers.api.token("ada"))["Authorization"]
        by_http, by_grpc = servers.transport_with(authorization, "http"), servers.transport_with(authorization, "grpc")
        async with aclosing(await following(by_http, job)):
            assert (await told(by_grpc.events(job))).kind == "limited"
        async with aclosing(await until(lambda: following(by_grpc, job))):
            assert (await told(by_http.events(job))).kind == "limited"


@pytest.mark.parametrize("kind", KINDS)
async def test_every_way_out_gives_the_place_back(kind: Kind) -> None:
    async with narrow(kind, StreamLimits(per_token=1)) as (servers, job):
        ada = await servers.transport("ada")
        await put_checkpoint(servers.api, job, await admitted(servers.api, job), 1, {"a": b"abc"})
        for _ in range(3):
            for wrong in (ada.logs(job, position="a;b-c"), ada.events("a" * 13), ada.logs(job, attempt=9)):
                assert (await told(wrong)).kind in ("invalid", "not_found")
            with pytest.raises(Refused, match="invalid"):
                await ada.upload(b"", name="words.csv")
            assert (await ada.upload(CSV.encode(), name="words.csv")).bytes == len(CSV)
            assert (await ada.artifact(job, "a"))[0] == b"abc"
            with pytest.raises(Refused, match="not_found"):
                await ada.artifact(job, "b")
            assert [e async for e in ada.events(job, follow=False)]
            left = await following(ada, job)
            await left.aclose()
            limit_s = 0.2
            while not (late := await until(lambda s=limit_s: _seen(ada.events(job, timeout_s=s)))):  # type: ignore[misc]
                limit_s *= 2  # a busy machine needs longer for the first one
            assert late[0] == "job.submitted"
            await until(lambda: ada.artifact(job, "a"))


async def _seen(stream: Any) -> list[str]:
    """Return events up to the caller's own deadline."""
    found = []
    try:
        async for event in stream:
            found.append(event.kind)
    except Refused as error:
        if error.kind != "deadline":
            raise
    return found


# -------------------------------------------------------------------------------------------------- the end of a token


async def rest(stream: Any) -> list[Any]:
    """Return the remaining items of an ended stream; the transport's final error is ignored."""
    found = []
    with suppress(Refused, StopAsyncIteration):
        while True:
            found.append(await anext(stream))
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_silent_follower_ends_with_its_token_and_no_other_does(kind: Kind) -> None:
    async with narrow(kind, LIMITS) as (servers, job):
        eve, olga = await servers.transport("eve", "read"), await servers.transport("olga")
        attempt = await admitted(servers.api, job)
        await servers.api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"zero\n")
        events, logs, other = await following(eve, job), eve.logs(job, timeout_s=GUARD_S), await following(olga, job)
        await anext(logs)
        await servers.api.revoke("eve")
        told = [getattr(event, "kind", "") for event in await rest(events)]
        assert (told, await rest(logs)) == ([], [])
        await happens(servers.api, job, "test.later")
        async with aclosing(other):
            assert (await anext(other)).kind == "test.later"


async def away(*_: Any) -> Any:
    raise StoreUnavailable("the database does not answer")


async def hanging(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("database", [away, hanging])
@pytest.mark.parametrize("kind", KINDS)
async def test_follower_ends_at_token_expiry_while_the_database_is_down(
    kind: Kind, database: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower is idle, and the database cannot be reached."""
    clock = ManualClock()
    monkeypatch.setattr("broker.api.core.stream_limits.ANSWER_S", 0.05)
    async with narrow(kind, LIMITS, clock=clock) as (servers, job):
        headers = await servers.api.token("eve", "read", expires_at=clock.time + timedelta(hours=1))
        stream = await following(servers.transport_with(headers["Authorization"]), job)
        monkeypatch.setattr(MemoryStore, "token", database)
        servers.api.app[AUTH].forget()
        clock.time += timedelta(hours=1)
        assert await rest(stream) == []


@asynccontextmanager
async def uploading(servers: ApiServers, authorization: str) -> AsyncIterator[asyncio.Task[str]]:
    """Yield an upload that began and does not continue; its result is the refusal."""
    event = asyncio.Event()

    async def by_http() -> str:
        async def body() -> AsyncIterator[bytes]:
            yield CSV.encode()
            await event.wait()

        headers = {"Authorization": authorization, "Content-Type": "application/octet-stream"}
        url = f"{servers.api.url}/v1/uploads?name=words.csv"
        async with servers.api.http.post(url, data=body(), headers=headers) as answer:
            return {401: "unauthenticated"}.get(answer.status, await answer.text())

    async def by_grpc() -> str:
        async def parts() -> AsyncIterator[pb.UploadRequest]:
            yield pb.UploadRequest(header=pb.UploadHeader(name="words.csv"))
            yield pb.UploadRequest(data=CSV.encode())
            await event.wait()

        try:
            stub = stubs.ArtifactServiceStub(servers.channel)
            return str(await stub.Upload(parts(), metadata=(("authorization", authorization),)))
        except grpc.aio.AioRpcError as error:
            return "unauthenticated" if lost_by_the_client(error) else refused(error).kind

    task = asyncio.create_task(by_http() if servers.kind == "http" else by_grpc())
    try:
        yield task
    finally:
        event.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def open_are(servers: ApiServers, count: int) -> None:
    """Wait until that number of streams is open."""
    while True:
        if servers.api.app[STREAMS].open == count:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_upload_that_does_not_continue_ends_with_its_token(kind: Kind) -> None:
    async with narrow(kind, LIMITS) as (servers, _):
        async with uploading(servers, (await servers.api.token("eve"))["Authorization"]) as upload:
            await open_are(servers, 1)
            await servers.api.revoke("eve")
            assert await upload == "unauthenticated"
        await open_are(servers, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unread_download_ends_with_its_token(kind: Kind) -> None:
    async with narrow(kind, LIMITS) as (servers, job):
        await put_checkpoint(servers.api, job, await admitted(servers.api, job), 1, {"big": bytes(BIG)})
        eve = (await servers.api.token("eve", "read"))["Authorization"]
        if kind == "http":
            headers = {"Authorization": eve}
            answer = await servers.api.http.get(f"{servers.api.url}/v1/jobs/{job}/artifacts/big", headers=headers)
            assert answer.status == 200
        else:
            stub = stubs.ArtifactServiceStub(servers.channel)
            request = pb.DownloadArtifactRequest(job_id=job, path="big")
            call = stub.DownloadArtifact(request, metadata=(("authorization", eve),))
            await anext(aiter(call))
        await open_are(servers, 1)
        await servers.api.revoke("eve")
        await open_are(servers, 0)
        if kind == "http":
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [message async for message in call]
            assert refused(error.value).kind == "unauthenticated"


async def test_a_download_continues_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with narrow("grpc", LIMITS) as (servers, job):
        await put_checkpoint(servers.api, job, await admitted(servers.api, job), 1, {"big": bytes(BIG)})
        eve = (await servers.api.token("eve", "read"))["Authorization"]
        request = pb.DownloadArtifactRequest(job_id=job, path="big")
        call = stubs.ArtifactServiceStub(servers.channel).DownloadArtifact(request, metadata=(("authorization", eve),))
        messages = aiter(call)
        await anext(messages)
        monkeypatch.setattr(MemoryStore, "token", away)
        servers.api.app[AUTH].forget()  # as after a while
        assert sum([len(message.data) async for message in messages]) == BIG
