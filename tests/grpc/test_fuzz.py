"""Whatever a client sends, the server answers with a status that is the client's to mend: never a fault of ours.

`GPUBROKER_FUZZ=2000` tries so many messages for each method; the default fits into CI.
"""

import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from broker.api.grpc.server import FILES
from broker.api.proto.gpubroker.v1.spec_pb2 import JobSpec
from broker.domain.job import JobState
from tests.api.harness import CSV
from tests.api.test_feeds import happens
from tests.api.test_files import admitted, put_checkpoint
from tests.doors.grpc_door import GrpcDoor, lost_by_the_client
from tests.doors.house import House
from tests.doors.message import write
from tests.doors.test_jobs import good
from tests.grpc.hostile import messages

EXAMPLES = int(os.environ.get("GPUBROKER_FUZZ", "60"))
METHODS = [m for file in FILES for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods]
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS)
GROWTH_BYTES = 256 * 1024**2
PATIENCE_S = 0.3
"""With a stream that goes on for as long as its job."""


@pytest.fixture
async def known(house: House) -> dict[str, list[Any]]:
    """A job at rest, one that runs and has results, one that waits; and what leads to them."""
    door = GrpcDoor(house.channel, (await house.api.token("ada"))["Authorization"])
    spec = await good(door)
    ended, _ = await door.submit(spec)
    await happens(house.api, ended.id, "job.failed", end=JobState.FAILED)
    running, _ = await door.submit(spec)
    await put_checkpoint(house.api, running.id, await admitted(house.api, running.id), 1, {"a": b"123"})
    queued, _ = await door.submit(spec)
    message = write(JobSpec(), spec)
    return {
        "job_id": [ended.id, running.id, queued.id],
        "spec": [message],
        "train": [message.train],
        "name": ["good-name", "words.csv"],
        "cap_usd": ["5.00", "1000000"],
        "path": ["a", message.train.data.path],
        "model": [message.train.model],
        "completion": ["{definition}"],
        "init_from": [f"job/{running.id}"],
        "data": [CSV.encode(), message.train.data],
    }


@pytest.fixture
async def authorization(house: House) -> AsyncIterator[str]:
    """Of one who may do everything; afterwards the server stands, and has not grown."""
    process = psutil.Process()
    before = process.memory_info().rss
    yield (await house.api.token("ada", "read", "submit", "admin"))["Authorization"]
    health = await health_pb2_grpc.HealthStub(house.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert process.memory_info().rss - before < GROWTH_BYTES


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
async def test_no_message_is_a_fault_of_the_server(
    method: Any, house: House, known: dict[str, list[Any]], authorization: str, data: st.DataObject
) -> None:
    one = messages(method.input_type, known)
    requests = data.draw(st.lists(one, max_size=4) if method.client_streaming else one.map(lambda m: [m]))
    code = await _answer(house.channel, method, requests, (("authorization", authorization),))
    event(code.name)
    assert code not in OURS, f"{method.full_name}: {code}"


async def _answer(channel: grpc.aio.Channel, method: Any, requests: list[Any], metadata: Any) -> grpc.StatusCode:
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    sent = iter(requests) if method.client_streaming else requests[0]
    answer = call(sent, metadata=metadata, timeout=PATIENCE_S if method.server_streaming else 30)
    try:
        if method.server_streaming:
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        if lost_by_the_client(error):
            return await _answer(channel, method, requests, metadata)
        return error.code()
    return grpc.StatusCode.OK
