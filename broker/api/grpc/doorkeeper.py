"""What every call passes: authentication, errors into statuses, measuring."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from broker.api.auth import Authenticator, Caller
from broker.api.grpc.refusals import DETAILS, fault, status_of
from broker.api.metrics import Metrics
from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.domain.tenancy import Scope

log = logging.getLogger(__name__)
access = logging.getLogger("gpubroker.access")
F = TypeVar("F", bound=Callable[..., Any])
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MARK = "__gpubroker_scope__"
MALFORMED = object()
CODES = {code.value[0]: code for code in grpc.StatusCode}


def scope(needed: Scope) -> Callable[[F], F]:
    """Says what a token must be good for to make this call; a method without it is open."""

    def mark(method: F) -> F:
        setattr(method, MARK, needed)
        return method

    return mark


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, authenticated; handlers get it in place of gRPC's context."""

    caller: Caller
    context: "grpc.aio.ServicerContext[Any, Any]"


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Wraps every method that is marked with a `scope`; health and reflection pass as they are."""

    def __init__(self, auth: Authenticator, measured: Metrics) -> None:
        self._auth = auth
        self._measured = measured

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        found: Any = await continuation(handler_call_details)
        if found is None:
            return None  # UNIMPLEMENTED
        behaviour = found.unary_unary or found.unary_stream or found.stream_unary or found.stream_stream
        needed = getattr(behaviour, MARK, None)
        if needed is None:
            return cast("Handler", found)
        method, metadata = handler_call_details.method, cast(Any, handler_call_details.invocation_metadata)
        given: str | None = next((value for key, value in metadata or () if key == "authorization"), None)
        try:
            caller = await self._auth.caller(given, needed)
        except Exception as error:
            return self._refusal(method, error)
        wrap = self._stream if found.response_streaming else self._one
        kind = f"{'stream' if found.request_streaming else 'unary'}_{'stream' if found.response_streaming else 'unary'}"
        changed = {
            "request_deserializer": _tolerant(found.request_deserializer),
            kind: wrap(method, behaviour, caller, given),
        }
        return cast("Handler", found._replace(**changed))

    def _refusal(self, method: str, error: Exception) -> "Handler":
        """Says it without waiting for a message: whoever has no token holds no place by sending none."""

        async def serve(_: Any, context: Any) -> None:
            with _Measure(self._measured, method) as measure:
                await measure.refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(serve)

    def _one(self, method: str, behaviour: Callable[..., Awaitable[Any]], caller: Caller, given: str | None) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            with _Measure(self._measured, method) as measure:
                try:
                    await self._auth.still(given)  # the message may come long after the token
                    return await behaviour(_readable(request), Call(caller=caller, context=context))
                except Exception as error:
                    await measure.refuse(context, error)

        return serve

    def _stream(
        self, method: str, behaviour: Callable[..., AsyncIterator[Any]], caller: Caller, given: str | None
    ) -> Any:
        async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
            with _Measure(self._measured, method) as measure:
                try:
                    await self._auth.still(given)
                    call = Call(caller=caller, context=context)
                    async with aclosing(cast(Any, behaviour(_readable(request), call))) as answers:
                        async for answer in answers:
                            await self._auth.still(given)
                            yield answer
                except Exception as error:
                    await measure.refuse(context, error)

        return serve


class _Measure:
    """Latency by method and code, and an access log without any metadata or message."""

    def __init__(self, measured: Metrics, method: str) -> None:
        self._measured = measured
        self._method = method
        self._code = grpc.StatusCode.OK
        self._started = perf_counter()

    def __enter__(self) -> "_Measure":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self._code = grpc.StatusCode.CANCELLED
        seconds = perf_counter() - self._started
        self._measured.called(self._method, self._code.name, seconds)
        access.info("%s %s %.1f ms", self._method, self._code.name, seconds * 1000)

    async def refuse(self, context: Any, error: Exception) -> None:
        """Ends the call with the status of an error."""
        if isinstance(error, GpubrokerError):
            status = status_of(error)
        else:
            log.exception("%s failed", self._method, exc_info=error)
            status = fault()
        self._code = CODES[status.code]
        await _abort(context, self._code, status)


async def _abort(context: Any, code: grpc.StatusCode, status: status_pb2.Status) -> None:
    await context.abort(code, status.message, trailing_metadata=((DETAILS, status.SerializeToString()),))


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC calls it a fault of the server when bytes are no message; it is the client's."""

    def tolerant(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError:
            return MALFORMED

    return tolerant


def _readable(request: Any) -> Any:
    """Raises InvalidInput, for a stream when it comes to the bytes that are none."""
    if hasattr(request, "__aiter__"):
        return _readables(request)
    if request is MALFORMED:
        raise InvalidInput(Problem(field="message", message="is not a message of this method's type; see the .proto"))
    return request


async def _readables(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)
