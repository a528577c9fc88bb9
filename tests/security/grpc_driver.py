"""Driver of gRPC, which derives the calls from the descriptors. An unknown field raises Unplayed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import grpc
from google.protobuf.json_format import MessageToJson
from google.protobuf.message_factory import GetMessageClass

from broker.api.grpc.server import FILES, serving
from tests.parity.message import write
from tests.parity.servers import parts
from tests.security.drivers import ServerFault, Unplayed
from tests.security.tried import ParameterValues, Tries
from tests.security.world import World, data_set

DETAILS = "grpc-status-details-bin"
TIMEOUT_S = 300.0
DESTRUCTIVE_METHODS = ("CancelJob", "RefuseJob", "DeleteJobData")
READING = ("Get", "List", "Watch", "Follow", "Download")
TARGETS = ("job_id", "path")
"""Fields that name the object of a call; all combinations of their values are tried."""
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "WatchEvents": {"follow": False},
    "FollowLogs": {"follow": False},
    "SubmitJob": {"spec": None},
    "CreateQuote": {"spec": None},
    "RaiseCap": {"cap_usd": "9"},
    "GetDecision": {"number": 1},
    "DownloadArtifact": {"path": "plan.txt"},
}
"""Required fields of a call; None: the first of the tried values."""


@dataclass(frozen=True, kw_only=True)
class GrpcAsk:
    label: str
    method: Any
    """Descriptor of the method."""
    requests: Sequence[Any]
    token: str | None


class GrpcDriver:
    name = "grpc"

    def asks(self, world: World) -> list[GrpcAsk]:
        services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
        methods = [method for service in services for method in service.methods]
        methods.sort(key=lambda method: (not method.name.startswith(READING), method.name in DESTRUCTIVE_METHODS))
        return [ask for method in methods for ask in _of(world, method)]

    async def answer(self, world: World, ask: GrpcAsk) -> str:
        channel = await self._channel(world)
        path = f"/{ask.method.containing_service.full_name}/{ask.method.name}"
        sending, answering = ask.method.client_streaming, ask.method.server_streaming
        kind = f"{'stream' if sending else 'unary'}_{'stream' if answering else 'unary'}"
        serializers = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": GetMessageClass(ask.method.output_type).FromString,
        }
        metadata = (("authorization", ask.token),) if ask.token else ()
        call = getattr(channel, kind)(path, **serializers)(
            iter(ask.requests) if sending else ask.requests[0], metadata=metadata, timeout=TIMEOUT_S
        )
        try:
            found = [message async for message in call] if answering else [await call]
        except grpc.aio.AioRpcError as error:
            return _refusal(error)
        return "\n".join(["OK", *(MessageToJson(message, indent=None, sort_keys=True) for message in found)])

    async def _channel(self, world: World) -> grpc.aio.Channel:
        if "grpc" not in world.connections:
            port = await world.stack.enter_async_context(serving(parts(world.api), "127.0.0.1", 0, grace_s=0))
            channel = await world.stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            world.connections["grpc"] = channel
        opened: grpc.aio.Channel = world.connections["grpc"]
        return opened


def _refusal(error: grpc.aio.AioRpcError) -> str:
    """Return the refusal as text. Raises ServerFault for a status that no call may return."""
    code = error.code()
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise ServerFault(f"{code.name} {error.details()}")
    details = [value for key, value in error.trailing_metadata() or () if key == DETAILS]
    return "\n".join([code.name, error.details() or "", *map(repr, details)])


def _of(world: World, method: Any) -> Iterator[GrpcAsk]:
    token = world.own.headers["Authorization"]
    if method.client_streaming:
        yield from _uploads(world, method, token)
        return
    tried = _Fields(world)
    fields = [field.name for field in method.input_type.fields]
    needed = {
        name: tried.of(method, name)[0][1] if value is None else value
        for name, value in REQUIRED.get(method.name, {}).items()
    }
    targets = [name for name in fields if name in TARGETS]
    for chosen in itertools.product(*(tried.of(method, name) for name in targets)):
        about = "".join(f" {name}={what}" for name, (what, _) in zip(targets, chosen, strict=True))
        fixed = {**needed, **{name: value for name, (_, value) in zip(targets, chosen, strict=True)}}
        turns: list[tuple[str, dict[str, Any]]] = [("", {})]
        for name in fields:
            if name not in TARGETS:
                turns += [(f" {name}={what}", {name: value}) for what, value in tried.of(method, name)]
        for what, given in turns:
            request = write(GetMessageClass(method.input_type)(), {**fixed, **given})
            yield GrpcAsk(label=f"{method.name}{about}{what}", method=method, requests=[request], token=token)
    empty = GetMessageClass(method.input_type)()
    yield GrpcAsk(label=f"{method.name} without a token", method=method, requests=[empty], token=None)


def _uploads(world: World, method: Any, token: str) -> Iterator[GrpcAsk]:
    """Yield uploads, the only client stream: both data sets, each with red's hash, blue's hash and no hash."""
    request = GetMessageClass(method.input_type)
    hashes = {"own": world.own.ref.removeprefix("upload:"), "other": world.other.ref.removeprefix("upload:"), "": None}
    for mark, (promised, sha256) in itertools.product(("red's own", "blue's own"), hashes.items()):
        head = write(request(), {"header": {"name": "words.csv", "sha256": sha256}})
        sent = [head, request(data=data_set(mark))]
        yield GrpcAsk(label=f"{method.name} {mark} promised={promised}", method=method, requests=sent, token=token)


class _Fields:
    """Values to try for each field, the same as HTTP's for the parameters of these names."""

    def __init__(self, world: World) -> None:
        here = ParameterValues(world)
        tried = here.by_name
        self._values: dict[str, Tries] = {
            "idempotency_key": tried["Idempotency-Key"],
            "position": tried["Last-Event-ID"][1:],
            "spec": here.by_schema["JobSpec"],
            "cap_usd": [("9", "9"), ("1", "1")],
            "up_to_usd": [("60", "60")],
            "kind": [(what, [value]) for what, value in tried["kind"]],
            "offset": [("3", 3), ("99", 99)],
            "number": [("1", 1), ("99", 99)],
            "resume": [("0", False)],
            "follow": [("0", False)],
            "label": [(what, [value]) for what, value in tried["label"]],
            "state": [(what, [value]) for what, value in tried["state"]],
        }
        for name in ("accelerator", "gpu", "cloud", "region"):
            self._values[name] = [(what, [value]) for what, value in tried[name]]
        for name in ("since", "until"):
            self._values[name] = [(what, datetime.fromisoformat(value)) for what, value in tried[name]]
        for name in ("limit", "after", "attempt", "gpus", "days", "points"):
            self._values[name] = [(what, int(value)) for what, value in tried[name]]
        for name in ("job_id", "path", "owner", "team", "cursor", "provider", "market"):
            self._values[name] = tried[name]

    def of(self, method: Any, name: str) -> Tries:
        if name not in self._values:
            raise Unplayed(f"{method.name} takes {name}: give values to try in grpc_driver.py")
        return self._values[name]
