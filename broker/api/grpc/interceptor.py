"""Interceptor of every call: authentication, stream limits, error statuses and metrics."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from broker.api.core.auth import Authenticator, Caller
from broker.api.core.metrics import Metrics
from broker.api.core.problems import drop_tracebacks
from broker.api.core.stream_limits import ANSWER_S, Streams
from broker.api.grpc.anonymous_limits import OPEN, AnonymousCallLimit
from broker.api.grpc.status import DETAILS, internal_error, status_of
from broker.domain.errors import GpubrokerError, InvalidInput, Problem, StoreUnavailable
from broker.domain.tenancy import Scope

log = logging.getLogger(__name__)
access = logging.getLogger("gpubroker.access")
F = TypeVar("F", bound=Callable[..., Any])
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MARK = "__gpubroker_scope__"
MALFORMED, TOO_LARGE = object(), object()
SINGLE_BYTES = 1536 * 1024
"""Maximum bytes of the message of a call with one message. Parsing as many holds the interpreter's lock for 0.1 s."""
MESSAGE_S = 30.0
"""Seconds that a call may be open without its first message."""
OUTAGE_S = 5.0
"""Seconds between two checks of a token while the database does not answer."""
CODES = {code.value[0]: code for code in grpc.StatusCode}


def scope(needed: Scope) -> Callable[[F], F]:
    """Declare the scope that a token needs for a method. A method without a declaration needs `admin`."""

    def mark(method: F) -> F:
        setattr(method, MARK, needed)
        return method

    return mark


@dataclass(frozen=True, kw_only=True)
class GrpcCall:
    """One authenticated call; handlers get it instead of gRPC's context."""

    caller: Caller


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method. A call's token is checked before any of its messages."""

    def __init__(self, auth: Authenticator, streams: Streams, measured: Metrics) -> None:
        self._auth = auth
        self._streams = streams
        self._measured = measured
        self._guests = AnonymousCallLimit()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        registered: Any = await continuation(handler_call_details)
        if registered is None:
            return None  # UNIMPLEMENTED
        metadata = cast(Any, handler_call_details.invocation_metadata)
        authorization: str | None = next((value for key, value in metadata or () if key == "authorization"), None)
        method = _Method.of(handler_call_details.method, registered)

        # Register every method as a stream. gRPC calls the handler of a single message only when the message has
        # arrived. A caller without a token could hold a place by sending no message.
        kind = (
            grpc.stream_stream_rpc_method_handler
            if method.has_response_stream
            else grpc.stream_unary_rpc_method_handler
        )
        serve = (
            self._serve_stream(method, authorization)
            if method.has_response_stream
            else self._serve_unary(method, authorization)
        )
        read = _tolerant(registered.request_deserializer, None if method.has_request_stream else SINGLE_BYTES)
        write = registered.response_serializer
        return kind(serve, request_deserializer=read, response_serializer=write)

    def _serve_unary(self, method: "_Method", authorization: str | None) -> Any:
        async def answer(requests: Any, context: Any) -> Any:
            async with self._entered(method, authorization, requests, context) as (request, call):
                return await method.behaviour(request, call)

        return self._served(method, answer)

    def _serve_stream(self, method: "_Method", authorization: str | None) -> Any:
        async def answer(requests: Any, context: Any) -> None:
            async with (
                self._entered(method, authorization, requests, context) as (request, call),
                aclosing(method.behaviour(request, call)) as answers,
            ):
                next_check = 0.0
                async for message in answers:
                    if not method.is_open and perf_counter() >= next_check:
                        next_check = await self._check_token(authorization)
                    await _send(context, message)

        return self._served(method, answer)

    def _served(self, method: "_Method", answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Wrap a method's answer to end the call with the status of its error.

        gRPC keeps the frame of `serve` with the error of an ended call until a garbage collection. That frame must
        not refer to a message.
        """

        async def serve(requests: Any, context: Any) -> Any:
            with _CallMetrics(self._measured, method.name) as measure:
                try:
                    return await answer(requests, context)
                except _ClientDisconnected:
                    measure.left()
                except Exception as error:
                    await measure.refuse(context, error)

        return serve

    async def _check_token(self, authorization: str | None) -> float:
        """Check the token again and return the time of the next check; 0.0: before the next message.

        If the database does not answer, the call may continue until the known expiry, when `Streams` ends the call.
        Raises Unauthenticated.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._auth.recheck(authorization)
        except (StoreUnavailable, TimeoutError):
            return perf_counter() + OUTAGE_S
        return 0.0

    @asynccontextmanager
    async def _entered(
        self, method: "_Method", authorization: str | None, requests: Any, context: Any
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Check token and limits, then yield (the request, the handler's context)."""
        if method.is_open:
            with self._guests.slot(method.name):
                yield await method.request(requests, context, self._guests.silent(method.name, MESSAGE_S)), context
            return
        caller = await self._auth.caller(authorization, method.needed)
        async with self._slot(method, caller, authorization):
            request = await method.request(requests, context, asyncio.timeout(MESSAGE_S))
            await self._auth.recheck(authorization)  # the token may have ended before the message arrived
            size = 0 if method.has_request_stream else request.ByteSize()
            with self._streams.requests.large(caller.team, size):
                yield request, GrpcCall(caller=caller)

    @asynccontextmanager
    async def _slot(self, method: "_Method", caller: Caller, authorization: str | None) -> AsyncIterator[None]:
        """Count a call by the limits of streams, or by those of requests. Raises TooMany."""
        if method.is_streaming:
            async with self._streams.slot(caller, authorization):
                yield
        else:
            with self._streams.requests.request(caller.team, 0):
                yield


@dataclass(frozen=True, kw_only=True)
class _Method:
    name: str
    behaviour: Callable[..., Any]
    needed: Scope
    has_request_stream: bool
    has_response_stream: bool

    @classmethod
    def of(cls, name: str, handler: Any) -> "_Method":
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        return cls(
            name=name,
            behaviour=behaviour,
            needed=getattr(behaviour, MARK, "admin"),
            has_request_stream=handler.request_streaming,
            has_response_stream=handler.response_streaming,
        )

    @property
    def is_open(self) -> bool:
        return self.name in OPEN

    @property
    def is_streaming(self) -> bool:
        return self.has_request_stream or self.has_response_stream

    async def request(self, requests: Any, context: Any, timeout: AbstractAsyncContextManager[Any]) -> Any:
        """Return the message, or the stream of messages once the first has arrived. Raises InvalidInput."""
        try:
            async with timeout:
                first = await context.read()
        except TimeoutError:
            raise InvalidInput(Problem(field="message", message="did not come; send it with the call")) from None
        if self.has_request_stream:
            return _readables(first, requests)
        if first is grpc.aio.EOF:
            raise InvalidInput(Problem(field="message", message="is missing; send one"))
        return _readable(first)


class _ClientDisconnected(Exception):
    """The client disconnected."""


async def _send(context: Any, answer: Any) -> None:
    """Send a message. Raises _ClientDisconnected."""
    try:
        await context.write(answer)
    except grpc.aio.BaseError as error:
        raise _ClientDisconnected from error


class _CallMetrics:
    """Measures latency by method and code, and writes an access log without metadata or messages."""

    def __init__(self, measured: Metrics, method: str) -> None:
        self._measured = measured
        self._method = method
        self._code = grpc.StatusCode.OK
        self._started = perf_counter()

    def __enter__(self) -> "_CallMetrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self._code = grpc.StatusCode.CANCELLED
        seconds = perf_counter() - self._started
        self._measured.called(self._method, self._code.name, seconds)
        access.info("%s %s %.1f ms", self._method, self._code.name, seconds * 1000)

    def left(self) -> None:
        """Count a call whose client disconnected before the end."""
        self._code = grpc.StatusCode.CANCELLED

    async def refuse(self, context: Any, error: Exception) -> None:
        """End the call with the status of an error."""
        if isinstance(error, GpubrokerError):
            status = status_of(error)
        else:
            log.exception("%s failed", self._method, exc_info=error)
            status = internal_error()
        drop_tracebacks(error)
        self._code = CODES[status.code]
        await _abort(context, self._code, status)


async def _abort(context: Any, code: grpc.StatusCode, status: status_pb2.Status) -> None:
    await context.abort(code, status.message, trailing_metadata=((DETAILS, status.SerializeToString()),))


def _tolerant(read: Callable[[bytes], Any], max_bytes: int | None) -> Callable[[bytes], Any]:
    """Wrap a deserializer to return MALFORMED for invalid bytes, which gRPC would report as a fault of the server.

    Returns TOO_LARGE, without parsing, for more than `max_bytes`.
    """

    def tolerant(raw: bytes) -> Any:
        if max_bytes is not None and len(raw) > max_bytes:
            return TOO_LARGE
        try:
            return read(raw)
        except DecodeError:
            return MALFORMED

    return tolerant


def _readable(request: Any) -> Any:
    """Return a valid message. Raises InvalidInput for invalid bytes, and for too many."""
    if request is TOO_LARGE:
        raise InvalidInput(Problem(field="message", message=f"has more than {SINGLE_BYTES} bytes; send less"))
    if request is MALFORMED:
        raise InvalidInput(Problem(field="message", message="is not a message of this method's type; see the .proto"))
    return request


async def _readables(first: Any, others: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield valid messages. Raises InvalidInput at the first invalid bytes."""
    if first is grpc.aio.EOF:
        return
    yield _readable(first)
    async for request in others:
        yield _readable(request)
