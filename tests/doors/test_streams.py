"""What stays open, by either door: so much and no more, given back on every way out, and over with its token."""

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
from broker.store.memory.store import MemoryStore
from tests.api.harness import CSV, LIMITS
from tests.api.test_feeds import happens
from tests.api.test_files import admitted, put_checkpoint
from tests.conformance.samples import ManualClock
from tests.doors.door import Door, Refused
from tests.doors.grpc_door import lost_by_the_client, refused
from tests.doors.house import KINDS, House, Kind, standing
from tests.doors.test_jobs import good
from trainer.contract import object_keys as keys

GUARD_S = 300
"""For a machine that has much else to do."""
BIG = 48 * 1024**2
"""More than two sockets hold for a client that does not read."""


@asynccontextmanager
async def narrow(kind: Kind, limits: StreamLimits, **how: Any) -> AsyncIterator[tuple[House, str]]:
    """(a house with these limits, the job of a member whose token is not asked for again)"""
    async with standing(MemoryStore(SystemClock()), kind, limits=limits, **how) as house, asyncio.timeout(GUARD_S):
        operator = await house.door("olga")
        job, _ = await operator.submit(await good(operator))
        yield house, job.id


async def following(door: Door, job: str) -> Any:
    """An open stream of events."""
    stream = door.events(job, timeout_s=GUARD_S)
    await anext(stream)
    return stream


async def told(stream: Any) -> Refused:
    with pytest.raises(Refused) as error:
        await anext(stream)
    return error.value


async def until(step: Callable[[], Any]) -> Any:
    """What `step` gives as soon as it is no longer refused for what is open."""
    while True:
        try:
            return await step()
        except Refused as error:
            if error.kind != "limited":
                raise


# ------------------------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize("kind", KINDS)
async def test_one_token_has_so_many_open_and_all_together_so_many(kind: Kind) -> None:
    async with narrow(kind, StreamLimits(per_token=2, total=3)) as (house, job):
        ada, bob, eve = [await house.door(owner) for owner in ("ada", "bob", "eve")]
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


async def test_both_doors_count_together() -> None:
    async with narrow("http", StreamLimits(per_token=1)) as (house, job):
        authorization = (await house.api.token("ada"))["Authorization"]
        by_http, by_grpc = house.door_of(authorization, "http"), house.door_of(authorization, "grpc")
        async with aclosing(await following(by_http, job)):
            assert (await told(by_grpc.events(job))).kind == "limited"
        async with aclosing(await until(lambda: following(by_grpc, job))):
            assert (await told(by_http.events(job))).kind == "limited"


@pytest.mark.parametrize("kind", KINDS)
async def test_every_way_out_gives_the_place_back(kind: Kind) -> None:
    async with narrow(kind, StreamLimits(per_token=1)) as (house, job):
        ada = await house.door("ada")
        await put_checkpoint(house.api, job, await admitted(house.api, job), 1, {"a": b"abc"})
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
    """Events up to the caller's own deadline."""
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
    """Of a stream that is ended, whatever its door says then."""
    found = []
    with suppress(Refused, StopAsyncIteration):
        while True:
            found.append(await anext(stream))
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_silent_follower_ends_with_its_token_and_no_other_does(kind: Kind) -> None:
    async with narrow(kind, LIMITS) as (house, job):
        eve, olga = await house.door("eve", "read"), await house.door("olga")
        attempt = await admitted(house.api, job)
        await house.api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), b"zero\n")
        events, logs, other = await following(eve, job), eve.logs(job, timeout_s=GUARD_S), await following(olga, job)
        await anext(logs)
        await house.api.revoke("eve")
        told = [getattr(event, "kind", "") for event in await rest(events)]
        assert (told, await rest(logs)) == ([], [])
        await happens(house.api, job, "test.later")
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
    """A silent follower ends when its token expires though the database is away."""
    clock = ManualClock()
    monkeypatch.setattr("broker.api.core.stream_limits.ANSWER_S", 0.05)
    async with narrow(kind, LIMITS, clock=clock) as (house, job):
        headers = await house.api.token("eve", "read", expires_at=clock.time + timedelta(hours=1))
        stream = await following(house.door_of(headers["Authorization"]), job)
        monkeypatch.setattr(MemoryStore, "token", database)
        house.api.app[AUTH].forget()
        clock.time += timedelta(hours=1)
        assert await rest(stream) == []


@asynccontextmanager
async def uploading(house: House, authorization: str) -> AsyncIterator[asyncio.Task[str]]:
    """An upload that began and does not go on; its result is how it was refused."""
    held = asyncio.Event()

    async def by_http() -> str:
        async def body() -> AsyncIterator[bytes]:
            yield CSV.encode()
            await held.wait()

        headers = {"Authorization": authorization, "Content-Type": "application/octet-stream"}
        url = f"{house.api.url}/v1/uploads?name=words.csv"
        async with house.api.http.post(url, data=body(), headers=headers) as answer:
            return {401: "unauthenticated"}.get(answer.status, await answer.text())

    async def by_grpc() -> str:
        async def parts() -> AsyncIterator[pb.UploadRequest]:
            yield pb.UploadRequest(header=pb.UploadHeader(name="words.csv"))
            yield pb.UploadRequest(data=CSV.encode())
            await held.wait()

        try:
            stub = stubs.ArtifactServiceStub(house.channel)
            return str(await stub.Upload(parts(), metadata=(("authorization", authorization),)))
        except grpc.aio.AioRpcError as error:
            return "unauthenticated" if lost_by_the_client(error) else refused(error).kind

    task = asyncio.create_task(by_http() if house.kind == "http" else by_grpc())
    try:
        yield task
    finally:
        held.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def open_are(house: House, count: int) -> None:
    """Waits until it is so."""
    while True:
        if house.api.app[STREAMS].open == count:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_upload_that_does_not_go_on_ends_with_its_token(kind: Kind) -> None:
    async with narrow(kind, LIMITS) as (house, _):
        async with uploading(house, (await house.api.token("eve"))["Authorization"]) as upload:
            await open_are(house, 1)
            await house.api.revoke("eve")
            assert await upload == "unauthenticated"
        await open_are(house, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_download_that_nobody_reads_ends_with_its_token(kind: Kind) -> None:
    async with narrow(kind, LIMITS) as (house, job):
        await put_checkpoint(house.api, job, await admitted(house.api, job), 1, {"big": bytes(BIG)})
        eve = (await house.api.token("eve", "read"))["Authorization"]
        if kind == "http":
            headers = {"Authorization": eve}
            answer = await house.api.http.get(f"{house.api.url}/v1/jobs/{job}/artifacts/big", headers=headers)
            assert answer.status == 200
        else:
            stub = stubs.ArtifactServiceStub(house.channel)
            request = pb.DownloadArtifactRequest(job_id=job, path="big")
            call = stub.DownloadArtifact(request, metadata=(("authorization", eve),))
            await anext(aiter(call))
        await open_are(house, 1)
        await house.api.revoke("eve")
        await open_are(house, 0)
        if kind == "http":
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [message async for message in call]
            assert refused(error.value).kind == "unauthenticated"


async def test_a_download_goes_on_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with narrow("grpc", LIMITS) as (house, job):
        await put_checkpoint(house.api, job, await admitted(house.api, job), 1, {"big": bytes(BIG)})
        eve = (await house.api.token("eve", "read"))["Authorization"]
        request = pb.DownloadArtifactRequest(job_id=job, path="big")
        call = stubs.ArtifactServiceStub(house.channel).DownloadArtifact(request, metadata=(("authorization", eve),))
        messages = aiter(call)
        await anext(messages)
        monkeypatch.setattr(MemoryStore, "token", away)
        house.api.app[AUTH].forget()  # as after a while
        assert sum([len(message.data) async for message in messages]) == BIG
