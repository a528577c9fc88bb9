"""Invalid gRPC calls: any message or bytes, any metadata, and clients that disconnect half-way."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from broker.api.grpc.server import FILES
from tests.api.fuzz.messages import messages
from tests.api.fuzz.world import World
from tests.parity.grpc_transport import lost_by_the_client

METHODS = [
    method
    for file in (*FILES, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS)
"""Statuses that no caller can cause while the database and the blob store are available."""
STREAM_TIMEOUT_S = 0.05
"""Seconds to follow a stream that lasts as long as its job."""
ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call of a gRPC method, as bytes on the wire."""

    requests: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...]
    leaves_after: int | None
    """Number of answers after which the client cancels; None: it reads to the end."""


@dataclass(kw_only=True)
class MethodResult:
    """Results of one method: number of answers by status, and faults."""

    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.codes.total()


KEYS = st.from_regex(r"[a-z0-9_.-]{1,20}", fullmatch=True).filter(lambda key: not key.startswith("grpc-"))
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
TOKENS = st.sampled_from((
    "", "Bearer", "Bearer ", "Bearer gb_aaaaaaaa_" + "a" * 32, "Basic YTpi", "Bearer " + "a" * 5000,
    "bearer x, Bearer y",
)) | PRINTABLE  # fmt: skip


def _pairs() -> st.SearchStrategy[tuple[str, str | bytes]]:
    text = st.tuples(KEYS.filter(lambda key: not key.endswith("-bin")), PRINTABLE)
    return text | st.tuples(KEYS.map(lambda key: key + "-bin"), st.binary(max_size=100))


def metadata(authorization: str) -> st.SearchStrategy[tuple[tuple[str, str | bytes], ...]]:
    """Return metadata that mostly has a good token, and otherwise none, another, or two."""
    good = st.just((("authorization", authorization),))
    strange = st.lists(TOKENS, max_size=2).map(lambda texts: tuple(("authorization", text) for text in texts))
    others = st.lists(_pairs(), max_size=4).map(tuple)
    return good | good | good | st.tuples(good | strange, others).map(lambda both: (*both[0], *both[1]))


def _damaged(raw: bytes) -> st.SearchStrategy[bytes]:
    """Return a message that is cut, extended, or has one changed byte."""
    places = st.integers(0, max(0, len(raw) - 1))
    cut = places.map(lambda at: raw[:at])
    longer = st.binary(min_size=1, max_size=50).map(lambda more: raw + more)
    changed = st.tuples(places, st.integers(0, 255)).map(lambda p: raw[: p[0]] + bytes([p[1]]) + raw[p[0] + 1 :])
    return cut | longer | changed


def calls(method: Any, known: dict[str, list[Any]], authorization: str) -> st.SearchStrategy[Call]:
    """Return any call of this method; half of its messages are well-formed."""
    whole = messages(method.input_type, known).map(lambda message: message.SerializeToString())
    raw = whole | whole | whole | whole.flatmap(_damaged) | st.binary(max_size=300)
    requests = st.lists(raw, max_size=4) if method.client_streaming else st.lists(raw, min_size=1, max_size=1)
    leaves = st.none() | st.none() | st.integers(0, 2)
    return st.builds(
        Call, requests=requests.map(tuple), metadata=metadata(authorization), leaves_after=leaves
    )  # fmt: skip


async def answer(channel: grpc.aio.Channel, method: Any, call: Call) -> str:
    """Return the name of the status, or `LEFT` or `REFUSED` (gRPC's own client would not send the call)."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    begin = getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda raw: raw,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    sent = _request_stream(call.requests) if method.client_streaming else call.requests[0]
    try:
        begun = begin(sent, metadata=call.metadata, timeout=STREAM_TIMEOUT_S if method.server_streaming else ANSWER_S)
        return await _heard(begun, method, call.leaves_after)
    except grpc.aio.AioRpcError as error:
        if lost_by_the_client(error):
            return await answer(channel, method, call)
        return error.code().name
    except (asyncio.CancelledError, grpc.aio.UsageError):
        return "LEFT"
    except (ValueError, TypeError):
        return "REFUSED"


async def _request_stream(requests: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def _heard(begun: Any, method: Any, leaves_after: int | None) -> str:
    if leaves_after == 0:
        await asyncio.sleep(0)  # a moment, so that it may have arrived
        begun.cancel()
    if not method.server_streaming:
        await begun
        return "OK"
    heard = 0
    async for _ in begun:
        heard += 1
        if heard == leaves_after:
            begun.cancel()
            return "LEFT"
    code: grpc.StatusCode = await begun.code()
    return code.name


async def fuzz(world: World, method: Any, seed: int, examples: int) -> MethodResult:
    """Draw calls by Hypothesis in a thread and make them in this loop. A fault is reported by its smallest call."""
    authorization = await world.authorization(seed)
    loop, heard = asyncio.get_running_loop(), MethodResult()

    @seeded(seed)
    @settings(
        max_examples=examples, database=None, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink), print_blob=False,
    )  # fmt: skip
    @given(calls(method, world.known, authorization))
    def one(call: Call) -> None:
        code = asyncio.run_coroutine_threadsafe(answer(world.servers.channel, method, call), loop).result()
        heard.codes[code] += 1
        assert code not in {ours.name for ours in OURS}, f"{method.full_name}: {code}: {call}"

    try:
        await asyncio.to_thread(one)
    except AssertionError as fault:
        heard.faults.append(str(fault))
    return heard
