"""Features of gRPC only: statuses with details, health, reflection, message caps, cancellation, rules of streams."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from broker.api.core import request_slots
from broker.api.core.auth import Authenticator
from broker.api.core.body_limits import MAX_VALUES
from broker.api.core.request_slots import LARGE_BYTES
from broker.api.grpc import jobs as jobs_door
from broker.api.grpc.interceptor import SINGLE_BYTES
from broker.api.grpc.server import MESSAGE_BYTES, METADATA_BYTES, SERVICES, AddressUnavailable, serving
from broker.api.grpc.status import DETAIL_BYTES, status_of
from broker.api.http.context import AUTH
from broker.api.proto.gpubroker.v1 import artifact_service_pb2 as artifact
from broker.api.proto.gpubroker.v1 import artifact_service_pb2_grpc as artifact_stubs
from broker.api.proto.gpubroker.v1 import job_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import job_service_pb2_grpc as stubs
from broker.api.service.jobs import Service
from broker.domain.errors import BlobsUnavailable, InvalidInput, Problem, StoreUnavailable
from broker.runtime.clock import SystemClock
from broker.runtime.token_bucket import TokenBucketRate
from tests.api.harness import CSV, memory_blobs
from tests.api.harness import serving as serving_http
from tests.api.test_files import admitted, put_checkpoint
from tests.parity.grpc_transport import GrpcTransport, refused
from tests.parity.servers import ApiServers, parts
from tests.parity.test_jobs import good
from tests.parity.transport import TIMEOUT_S, Refused
from tests.support.memory_store.store import MemoryStore
from trainer.contract import object_keys as keys

Metadata = tuple[tuple[str, str], ...]


async def signed(servers: ApiServers, *scopes: Any) -> Metadata:
    return (("authorization", (await servers.api.token("ada", *scopes))["Authorization"]),)


async def fails(call: Any) -> Refused:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return refused(error.value)


# -------------------------------------------------------------------------------------------------------------- errors


async def test_an_outage_says_when_to_ask_again(servers: ApiServers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the database does not answer")

    stub, me = stubs.JobServiceStub(servers.channel), await signed(servers)
    await stub.ListJobs(pb.ListJobsRequest(), metadata=me)
    monkeypatch.setattr(Service, "jobs", away)
    error = await fails(stub.ListJobs(pb.ListJobsRequest(), metadata=me))
    assert (error.kind, error.text, error.after_s) == (
        "unavailable",
        "the database gave no answer; the request may or may not have taken effect, read again",
        2.0,
    )


async def test_an_internal_error_reveals_nothing(servers: ApiServers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret: hunter2")

    monkeypatch.setattr(Service, "jobs", broken)
    stub, me = stubs.JobServiceStub(servers.channel), await signed(servers)
    error = await fails(stub.ListJobs(pb.ListJobsRequest(), metadata=me))
    assert (error.kind, error.text) == ("fault", "an internal error; the server's log has the details")


async def test_a_token_over_its_rate_gets_a_retry_time() -> None:
    async with serving_http(MemoryStore(SystemClock()), memory_blobs()) as api:
        made = parts(api)
        slow = Authenticator(api.service.store, SystemClock(), TokenBucketRate(per_s=0.01, burst=1))
        async with serving(replace(made, auth=slow), "127.0.0.1", 0) as port, _channel(port) as channel:
            door = GrpcTransport(channel, (await api.token("ada"))["Authorization"])
            await door.jobs()
            with pytest.raises(Refused) as refusal:
                await door.jobs()
            assert refusal.value.kind == "limited"
            assert refusal.value.after_s is not None
            assert 50 < refusal.value.after_s <= 100


def test_as_many_violations_as_fit_into_metadata_are_reported() -> None:
    many = InvalidInput(*(Problem(field=f"labels.{i}", message="ä" * 900) for i in range(50)))
    status = status_of(many)
    assert status.message == "50 fields are wrong; see the field violations"
    assert status.ByteSize() < DETAIL_BYTES + 500
    assert status_of(BlobsUnavailable("x" * 9000)).ByteSize() < 2000


async def test_bytes_that_are_no_message_are_the_callers_fault(servers: ApiServers) -> None:
    raw: Any = servers.channel.unary_unary("/gpubroker.v1.JobService/GetJob")
    error = await fails(raw(b"\xff\xff\xff", metadata=await signed(servers)))
    assert (error.kind, set(error.fields)) == ("invalid", {"message"})
    assert (await fails(raw(b"\xff\xff\xff"))).kind == "unauthenticated"
    upload: Any = servers.channel.stream_unary("/gpubroker.v1.ArtifactService/Upload")
    assert (await fails(upload(iter([b"\xff"]), metadata=await signed(servers)))).kind == "invalid"
    unknown: Any = servers.channel.unary_unary("/gpubroker.v1.JobService/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await unknown(b"", metadata=await signed(servers))
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_past_the_cap_is_refused(servers: ApiServers) -> None:
    stub = stubs.JobServiceStub(servers.channel)
    big = pb.SubmitJobRequest()
    big.spec.env["A"] = "x" * (4 * 1024**2)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.SubmitJob(big, metadata=await signed(servers))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_refused(servers: ApiServers, algorithm: grpc.Compression) -> None:
    """A few kilobytes would otherwise be inflated to the size limit in each of many calls."""
    stub = stubs.JobServiceStub(servers.channel)
    large = pb.SubmitJobRequest()
    large.spec.env["A"] = "x" * (3 * 1024**2)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.SubmitJob(large, metadata=await signed(servers), compression=algorithm)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_of_too_many_values_is_refused(servers: ApiServers) -> None:
    stub = stubs.JobServiceStub(servers.channel)
    labels, prompts = pb.SubmitJobRequest(), pb.SubmitJobRequest()
    labels.spec.labels.update({f"k{i}": "v" for i in range(MAX_VALUES + 1)})
    prompts.spec.train.samples.prompts.extend(["x"] * (MAX_VALUES + 1))
    for many in (labels, prompts):
        error = await fails(stub.SubmitJob(many, metadata=await signed(servers)))
        assert (error.kind, set(error.fields)) == ("invalid", {"message"})


async def test_calls_and_large_messages_of_a_team_are_limited(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, me, large = stubs.JobServiceStub(servers.channel), await signed(servers), pb.SubmitJobRequest()
    large.spec.name = "x" * (LARGE_BYTES + 1)
    monkeypatch.setattr(request_slots, "LARGE_OF_TEAM", 0)
    assert "too many requests with more than 64 KiB" in str(await fails(stub.SubmitJob(large, metadata=me)))
    await stub.ListJobs(pb.ListJobsRequest(), metadata=me)
    monkeypatch.setattr(request_slots, "REQUESTS_OF_TEAM", 0)
    assert "run already" in str(await fails(stub.ListJobs(pb.ListJobsRequest(), metadata=me)))


async def test_a_refused_message_is_freed_without_garbage_collection(servers: ApiServers) -> None:
    """gRPC keeps the frame of a handler with the error that ended it: 11 MB a call, and a daemon of 1 GiB was full."""
    stub, wrong = stubs.JobServiceStub(servers.channel), pb.SubmitJobRequest()
    wrong.spec.labels["k"] = "v"
    metadata = await signed(servers)
    await fails(stub.SubmitJob(wrong, metadata=metadata))
    gc.collect()
    gc.disable()
    try:
        before = messages()
        for _ in range(5):
            await fails(stub.SubmitJob(wrong, metadata=metadata))
        assert messages() <= before + 1
    finally:
        gc.enable()


def messages() -> int:
    return sum(isinstance(thing, pb.SubmitJobRequest) for thing in gc.get_objects())


async def test_a_large_single_message_is_refused_unparsed(servers: ApiServers) -> None:
    """Parsing 2.7 MB of labels held the interpreter's lock for 0.2 s."""
    many = pb.SubmitJobRequest()
    many.spec.labels.update({f"k{i}": "v" for i in range(SINGLE_BYTES // 10)})
    assert SINGLE_BYTES < many.ByteSize() < MESSAGE_BYTES
    error = await fails(stubs.JobServiceStub(servers.channel).SubmitJob(many, metadata=await signed(servers)))
    assert (error.kind, error.fields) == ("invalid", {"message": f"has more than {SINGLE_BYTES} bytes; send less"})


async def test_metadata_past_the_limit_is_refused_always(servers: ApiServers) -> None:
    """gRPC accepts a part of the calls between a soft and a hard limit."""
    stub = stubs.JobServiceStub(servers.channel)
    metadata = (*await signed(servers), ("filler", "x" * METADATA_BYTES))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ListJobs(pb.ListJobsRequest(), metadata=metadata)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# ------------------------------------------------------------------------------------------- deadlines and cancellation


class Stuck:
    """Replacement for a store's answer that does not come; it records whether its caller gave up."""

    def __init__(self) -> None:
        self.entered, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


async def test_work_ends_with_the_callers_deadline(servers: ApiServers, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    monkeypatch.setattr(Service, "jobs", stuck)
    stub = stubs.JobServiceStub(servers.channel)
    me, limit_s = await signed(servers), 0.2
    while not stuck.entered.is_set():  # a busy machine needs longer to begin with it
        error = await fails(stub.ListJobs(pb.ListJobsRequest(), metadata=me, timeout=limit_s))
        assert (error.kind, limit_s < TIMEOUT_S) == ("deadline", True)
        limit_s *= 2
    async with asyncio.timeout(TIMEOUT_S):
        await stuck.left.wait()


async def test_work_ends_when_the_caller_does(servers: ApiServers, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    monkeypatch.setattr(Service, "jobs", stuck)
    call = stubs.JobServiceStub(servers.channel).ListJobs(pb.ListJobsRequest(), metadata=await signed(servers))
    async with asyncio.timeout(TIMEOUT_S):
        waiting = asyncio.ensure_future(call)
        await stuck.entered.wait()
        call.cancel()
        await stuck.left.wait()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_stop_ends_followers_within_its_grace() -> None:
    async with serving_http(MemoryStore(SystemClock()), memory_blobs()) as api:
        async with serving(parts(api), "127.0.0.1", 0, grace_s=0.1) as port:
            channel = _channel(port)
            door = GrpcTransport(channel, (await api.token("ada"))["Authorization"])
            job, _ = await door.submit(await good(door))
            stream = door.events(job.id)
            await anext(stream)
        with pytest.raises(Refused) as refusal:
            async with asyncio.timeout(TIMEOUT_S):
                await anext(stream)
        assert refusal.value.kind in ("unavailable", "deadline")
        await channel.close()


# --------------------------------------------------------------------------------------------- health and reflection


async def test_health_follows_readiness(servers: ApiServers, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = health_pb2_grpc.HealthStub(servers.channel)
    for name in ("", *SERVICES):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    listed = await stub.List(health_pb2.HealthListRequest())
    assert {answer.status for answer in listed.statuses.values()} == {health_pb2.HealthCheckResponse.SERVING}
    assert {"", name} <= listed.statuses.keys()
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    await servers.api.service.blobs.delete(keys.BROKER_LEASE)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await fails(stub.Check(health_pb2.HealthCheckRequest(service="other")))).kind == "not_found"
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()


async def test_a_call_without_a_token_is_refused_before_its_message_comes(servers: ApiServers) -> None:
    for method in ("GetJob", "WatchEvents"):
        call: Any = servers.channel.stream_unary(f"/gpubroker.v1.JobService/{method}")(timeout=TIMEOUT_S)
        assert (await fails(call)).kind == "unauthenticated"


async def test_a_message_that_comes_after_its_token_was_revoked_does_nothing(servers: ApiServers) -> None:
    me = await signed(servers)
    sent = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await sent.wait()
        yield pb.ListJobsRequest().SerializeToString()

    open_call: Any = servers.channel.stream_unary("/gpubroker.v1.JobService/ListJobs")
    call = open_call(late(), metadata=me, timeout=TIMEOUT_S)
    await call.wait_for_connection()
    await stubs.JobServiceStub(servers.channel).ListJobs(pb.ListJobsRequest(), metadata=me)
    for token in await servers.api.service.store.tokens():
        await servers.api.service.store.delete_token(token.id)
    servers.api.app[AUTH].forget()
    sent.set()
    assert (await fails(call)).kind == "unauthenticated"


async def test_watchers_of_health_leave_slots_for_others(servers: ApiServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.api.grpc.anonymous_limits.PLACES", 2)
    stub = health_pb2_grpc.HealthStub(servers.channel)
    watching = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "other")]
    for watch in watching:
        await watch.read()
    assert (
        await fails(stub.Watch(health_pb2.HealthCheckRequest()).read())
    ).text == "2 of these calls are open already; end one of them, or ask again later"
    watching.pop().cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert (await stub.Watch(health_pb2.HealthCheckRequest()).read()).status
                return


async def test_reflection_lists_the_services_where_it_is_on(servers: ApiServers) -> None:
    async def listed(channel: grpc.aio.Channel) -> set[str]:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            return {s.name for s in answer.list_services_response.service}
        return set()

    assert await listed(servers.channel) >= SERVICES
    async with serving(parts(servers.api), "127.0.0.1", 0) as port, _channel(port) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await listed(channel)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ------------------------------------------------------------------------------------------------------------- streams


async def test_an_upload_begins_with_its_header_and_has_one(servers: ApiServers) -> None:
    header = artifact.UploadRequest(header=artifact.UploadHeader(name="words.csv"))
    data = artifact.UploadRequest(data=CSV.encode())
    stub, me = artifact_stubs.ArtifactServiceStub(servers.channel), await signed(servers)
    for parts_sent, field in (([], "header"), ([data], "header"), ([header, header], "data")):
        error = await fails(stub.Upload(iter(parts_sent), metadata=me))
        assert (error.kind, set(error.fields)) == ("invalid", {field})
    assert (await stub.Upload(iter([header, data, data]), metadata=me)).upload.bytes == 2 * len(CSV)


async def test_an_upload_that_breaks_off_keeps_nothing(servers: ApiServers) -> None:
    sent = asyncio.Event()

    async def endless() -> AsyncIterator[artifact.UploadRequest]:
        yield artifact.UploadRequest(header=artifact.UploadHeader(name="words.csv"))
        yield artifact.UploadRequest(data=CSV.encode())
        sent.set()
        await asyncio.Event().wait()

    call = artifact_stubs.ArtifactServiceStub(servers.channel).Upload(endless(), metadata=await signed(servers))
    waiting = asyncio.ensure_future(call)
    await sent.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [info.key for info in await servers.api.service.blobs.list("uploads/")] == []


async def test_a_download_continues_at_an_offset(servers: ApiServers) -> None:
    door = GrpcTransport(servers.channel, (await signed(servers))[0][1])
    job, _ = await door.submit(await good(door))
    attempt = await admitted(servers.api, job.id)
    big = bytes(range(251)) * 25_000
    await put_checkpoint(servers.api, job.id, attempt, 1, {"big": big})
    for offset in (0, 1, 1024**2, 4 * 1024**2, 5 * 1024**2 + 1, len(big) - 1, len(big)):
        data, sha256 = await door.artifact(job.id, "big", offset=offset)
        assert data == big[offset:]
        assert len(sha256) == 64
    for offset in (-1, len(big) + 1, 2**63 - 1):
        with pytest.raises(Refused) as refusal:
            await door.artifact(job.id, "big", offset=offset)
        assert set(refusal.value.fields) == {"offset"}


async def test_a_long_piece_of_a_log_comes_in_parts_and_none_is_lost(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_door, "CHUNK_CHARACTERS", 100)
    door = GrpcTransport(servers.channel, (await signed(servers))[0][1])
    job, _ = await door.submit(await good(door))
    attempt = await admitted(servers.api, job.id)
    text = "".join(f"line {i}\n" for i in range(100))
    await servers.api.service.blobs.put(keys.log_chunk(attempt, 0, "boot", 0), text.encode())
    stream = door.logs(job.id)
    first: Any = await anext(stream)
    rest: list[Any] = []
    while sum(len(p.text) for p in rest) + len(first.text) < len(text):
        rest.append(await anext(stream))
    assert first.text + "".join(p.text for p in rest) == text
    again: Any = await anext(door.logs(job.id, position=first.position))
    assert again.text == first.text
    assert rest[-1].position != first.position


async def test_logs_and_events_up_to_now_end_though_the_job_continues(servers: ApiServers) -> None:
    stub, me = stubs.JobServiceStub(servers.channel), await signed(servers)
    door = GrpcTransport(servers.channel, me[0][1])
    job, _ = await door.submit(await good(door))
    events = [e async for e in stub.WatchEvents(pb.WatchEventsRequest(job_id=job.id, follow=False), metadata=me)]
    assert [e.event.kind for e in events] == ["job.submitted"]
    assert [p async for p in stub.FollowLogs(pb.FollowLogsRequest(job_id=job.id, follow=False), metadata=me)] == []


async def test_a_port_that_is_taken_is_not_shared(servers: ApiServers) -> None:
    with pytest.raises(AddressUnavailable):
        async with serving(parts(servers.api), "127.0.0.1", servers.port):
            pass


def _channel(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}")


async def test_grpc_connections_beyond_the_limit_are_dropped(servers: ApiServers) -> None:
    """Beyond the bound a connection is dropped and the others are served."""
    async with (
        serving(parts(servers.api), "127.0.0.1", 0, connections=4, grace_s=0.1) as port,
        _channel(port) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        heard = [asyncio.create_task(reader.read()) for reader, _ in idle]  # to its end, which only dropped ones have
        async with asyncio.timeout(TIMEOUT_S):
            done, _ = await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED)
        assert done.pop().result() == b""
        await health.Check(health_pb2.HealthCheckRequest())
        for task, (_, writer) in zip(heard, idle, strict=True):
            task.cancel()
            writer.close()
