"""Requests to the daemon and their retries, and the base class of the typed calls."""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_exponential

from broker.api.schemas.base import ProblemView
from broker.client.transport.connection import Connection
from broker.client.transport.errors import ApiError, BrokenOff, DaemonUnreachable
from broker.paths import trusting

Answer = TypeVar("Answer", bound=BaseModel)
TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError)


class Transport:
    """Sender of requests to one daemon; retries for `retry_for_s` seconds after a transient failure (`is_transient`).

    `locate` returns the current address before every retry, because a restarted daemon may have another port.
    """

    def __init__(self, at: Connection, retry_for_s: float, locate: Callable[[], Connection | None]) -> None:
        self._at = at
        self._retry_for_s = retry_for_s
        self._locate = locate
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
        self._session = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def url(self) -> str:
        return self._at.url.rstrip("/")

    def _request_options(self) -> dict[str, Any]:
        """Return the arguments of every request. Raises DaemonUnreachable."""
        headers = {"Authorization": f"Bearer {self._at.token}"} if self._at.token else {}
        if not self._at.certificate:
            return {"headers": headers}
        try:
            return {"headers": headers, "ssl": trusting(self._at.certificate)}
        except (OSError, ssl.SSLError) as e:
            raise DaemonUnreachable(self.url, f"its certificate {self._at.certificate} cannot be read: {e}") from None

    @asynccontextmanager
    async def once(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request once. Raises ApiError; DaemonUnreachable also if the answer breaks off."""
        if self._session is None:
            raise RuntimeError("use the client with `async with`")
        options = self._request_options()
        options["headers"] |= request.pop("headers", {})
        try:
            async with self._session.request(method, self.url + path, **options, **request) as response:
                if response.status >= 400:
                    raise ApiError(await _problem(response))
                yield response
        except CONNECTION_ERRORS as e:
            raise DaemonUnreachable(self.url, _why(e)) from None

    @asynccontextmanager
    async def socket(self, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket. Raises ApiError for a refusal, DaemonUnreachable if the daemon disconnects."""
        if self._session is None:
            raise RuntimeError("use the client with `async with`")
        options = self._request_options()
        try:
            async with self._session.ws_connect(self.url + path, heartbeat=20.0, **options, **request) as opened:
                yield opened
        except aiohttp.WSServerHandshakeError as e:
            # The handshake's error lacks the body with the reason, so send the same request without an upgrade.
            async with self.once("GET", path, **request):
                raise DaemonUnreachable(self.url, f"{e.status}: a WebSocket was refused, perhaps by a proxy") from None
        except CONNECTION_ERRORS as e:
            raise DaemonUnreachable(self.url, _why(e)) from None

    async def read(self, method: str, path: str, **request: Any) -> bytes:
        """Return the answer's body. Raises ApiError, DaemonUnreachable.

        `tries` repeats the request, so a request that is not idempotent may take effect twice.
        """
        async for attempt in self.tries():
            with attempt:
                async with self.once(method, path, **request) as response:
                    return await response.read()
        raise AssertionError("tries() returns or raises")

    def tries(self) -> AsyncRetrying:
        """Return a loop that repeats its body after transient failures.

        Use: `async for attempt in tries(): with attempt: ...`.
        """
        return AsyncRetrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(self._retry_for_s),
            wait=wait_exponential(multiplier=0.25, max=3),
            before_sleep=self._follow,
            reraise=True,
        )

    def _follow(self, _: RetryCallState) -> None:
        current = self._locate()
        if current is not None:
            self._at = current


def is_transient(error: BaseException) -> bool:
    """Return True for a transient failure: no daemon answers, a download ended early, or a transient status."""
    return isinstance(error, DaemonUnreachable | BrokenOff) or (
        isinstance(error, ApiError) and error.status in TRANSIENT_STATUSES
    )


def _why(error: Exception) -> str:
    if type(error) is aiohttp.ClientResponseError:  # not its subclasses, which have their own messages
        return "the server there speaks no HTTP; is it the port of gRPC?"
    return str(error) or type(error).__name__


async def _problem(response: aiohttp.ClientResponse) -> ProblemView:
    body = await response.content.read(1024**2)
    try:
        return ProblemView.model_validate_json(body)
    except ValidationError:
        phrase = response.reason or "error"
        return ProblemView(
            title=phrase, status=response.status, detail=f"{response.status} {phrase}: is this a gpubroker?"
        )


def plain(parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the query parameters that are not None. A sequence becomes one parameter for each of its values."""
    pairs: list[tuple[str, str]] = []
    for name, value in parameters.items():
        values = value if isinstance(value, list | tuple) else [value]
        pairs.extend((name, str(v)) for v in values if v is not None)
    return pairs


class LazySchemas:
    """A module of `broker.api.schemas`, imported when a call first uses a name in it. A program needs few of them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(f"broker.api.schemas.{self._module}"), name)


class Calls:
    """Base class of the groups of typed calls. `AsyncClient` inherits all groups and sets the transport."""

    _http: Transport

    async def _call(self, method: str, path: str, answer: type[Answer], **request: Any) -> Answer:
        return answer.model_validate_json(await self._http.read(method, path, **request))
