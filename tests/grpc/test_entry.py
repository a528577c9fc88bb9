"""Admission of calls: the token is checked when a call comes, and an idle call without a token keeps no slot."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from broker.api.grpc.anonymous_limits import OPEN
from broker.api.grpc.interceptor import MARK
from broker.api.grpc.jobs import JobServicer
from broker.api.grpc.server import FILES
from broker.api.proto.gpubroker.v1 import job_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import job_service_pb2_grpc as stubs
from tests.grpc.test_server import fails, signed
from tests.parity.grpc_transport import refused
from tests.parity.servers import ApiServers
from tests.parity.transport import TIMEOUT_S, Refused

METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def half_open(servers: ApiServers, method: str, **named: Any) -> Any:
    """Start a call that sends its metadata and no message."""
    return servers.channel.stream_stream(method)(timeout=TIMEOUT_S, **named)


async def answer(call: Any) -> Refused:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    return refused(error.value)


@pytest.mark.parametrize("method", METHODS)
async def test_a_half_open_call_without_a_token_is_refused(servers: ApiServers, method: str) -> None:
    assert (await answer(half_open(servers, method))).kind == "unauthenticated"


async def test_a_method_whose_scope_was_forgotten_is_the_operators(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(JobServicer.ListJobs, MARK)
    assert (await answer(half_open(servers, "/gpubroker.v1.JobService/ListJobs"))).kind == "unauthenticated"
    stub = stubs.JobServiceStub(servers.channel)
    all_but_admin = await signed(servers, "read", "submit", "manage", "metrics")
    assert (await fails(stub.ListJobs(pb.ListJobsRequest(), metadata=all_but_admin))).kind == "forbidden"


@pytest.mark.parametrize("method", ["/gpubroker.v1.JobService/GetJob", "/gpubroker.v1.ArtifactService/Upload"])
async def test_a_token_without_a_message_keeps_no_place(
    servers: ApiServers, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.api.grpc.interceptor.MESSAGE_S", 0.05)
    error = await answer(half_open(servers, method, metadata=await signed(servers)))
    assert (error.kind, set(error.fields)) == ("invalid", {"message"})


async def test_no_message_at_all_is_the_callers_fault(servers: ApiServers) -> None:
    call = half_open(servers, "/gpubroker.v1.JobService/GetJob", metadata=await signed(servers))
    await call.done_writing()
    error = await answer(call)
    assert (error.kind, set(error.fields)) == ("invalid", {"message"})


@pytest.mark.parametrize("method", sorted(OPEN))
async def test_a_call_without_a_message_is_ended_after_a_while(
    servers: ApiServers, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.api.grpc.interceptor.MESSAGE_S", 0.05)
    assert (await answer(half_open(servers, method))).kind == "invalid"


async def test_silent_calls_give_way_to_one_with_a_request(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.api.grpc.anonymous_limits.PLACES", 2)
    monkeypatch.setattr("broker.api.grpc.interceptor.MESSAGE_S", 10 * TIMEOUT_S)
    check = "/grpc.health.v1.Health/Check"
    silent = [asyncio.create_task(answer(half_open(servers, check))) for _ in range(5)]
    await some_end(silent, 3)
    stub = health_pb2_grpc.HealthStub(servers.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    await some_end(silent, 4)
    assert [task.done() for task in silent].count(False) == 1
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)


async def some_end(tasks: list[asyncio.Task[Refused]], count: int) -> None:
    """Check only that the call ends, with any result."""
    async with asyncio.timeout(TIMEOUT_S):
        while sum(task.done() for task in tasks) < count:
            await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
    assert all(task.result().kind == "invalid" for task in tasks if task.done())


async def test_readers_of_the_services_leave_slots_for_others(
    servers: ApiServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.api.grpc.anonymous_limits.PLACES", 2)
    stub = reflection_pb2_grpc.ServerReflectionStub(servers.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")

    async def reading() -> Any:
        call = stub.ServerReflectionInfo(timeout=TIMEOUT_S)
        await call.write(ask)
        await call.read()
        return call

    calls = [await reading() for _ in range(2)]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await reading()
    assert refused(error.value).kind == "limited"
    check = health_pb2_grpc.HealthStub(servers.channel).Check(health_pb2.HealthCheckRequest())
    assert (await check).status == health_pb2.HealthCheckResponse.SERVING
    calls.pop().cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                calls.append(await reading())
                break
    for call in calls:
        call.cancel()
