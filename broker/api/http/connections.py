"""Limits and error answers of HTTP connections.

Replaces aiohttp's error answers, which are not problem documents, and its log lines, which repeat tokens.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import StreamReader, http_exceptions, web

from broker.api.core.problems import problem
from broker.api.core.stream_limits import MAX_CONNECTIONS, bounded_connections

log = logging.getLogger(__name__)
IDLE_S = 75.0
"""Maximum seconds from the start of a connection, or from its last answer, to a complete request head."""
LINE_BYTES = 16 * 1024
"""Maximum bytes of the request line, and of each header."""
MAX_SEGMENTS = 300
"""Maximum number of `/` of a path: aiohttp looks up each prefix. The path of a result has at most 256."""
DISCARDED_BYTES, DISCARDED_S = 8 * 1024**2, 5.0
"""Bytes of a body, and seconds, that are read and discarded after an answer that did not wait for the body.

A client that sends its body before it reads gets the answer. A longer body gets a closed connection.
"""


Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Runner(web.AppRunner):
    """Runs `build_app`'s application and drops connections beyond the limit."""

    def __init__(
        self, app: web.Application, *, shutdown_timeout: float = 60.0, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout, handler_cancellation=True)
        self.most = bounded_connections(max_connections)
        self._here = 0
        self._full = False

    @property
    def server(self) -> Any:
        """Factory of the connections' protocols."""
        factory = super().server
        return None if factory is None else partial(_Connection, self, factory)

    def opened(self) -> bool:
        """Count a new connection and return True if it is allowed.

        Logs the limit once, until usage falls below 90 %.
        """
        self._here += 1
        if self._here <= self.most:
            return True
        if not self._full:
            log.warning("%d connections are open, which is the most; more are dropped", self.most)
        self._full = True
        return False

    def closed(self) -> None:
        """Count a closed connection."""
        self._here -= 1
        self._full = self._full and self._here > 0.9 * self.most


class _Connection(web.RequestHandler):
    __slots__ = ("_runner",)

    def __init__(self, runner: Runner, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        bounds = {"keepalive_timeout": IDLE_S, "max_line_size": LINE_BYTES, "max_field_size": LINE_BYTES}
        # no inflating: aiohttp would inflate a refused body on the event loop; no lingering: it counts no bytes
        raw = {"auto_decompress": False, "lingering_time": 0}
        super().__init__(server, loop=loop, access_log=None, **bounds, **raw)  # type: ignore[arg-type]
        self._runner = runner
        self._request_handler = _bounded_path(server.request_handler)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._runner.opened():
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._runner.closed()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer. If the body has not arrived, close the connection after a bounded part of it."""
        is_early = not request.content.is_eof()
        if is_early:
            resp.force_close()
        result = await super().finish_response(request, resp, start_time)
        if is_early:
            await _discard(request.content)
        return result

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer malformed requests. Neither the answer nor the log repeats the input."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        log.info("what %s sent is not a request: %s", request.remote, type(exc).__name__)
        response = problem(400, f"this is not a valid HTTP request: {_fault(exc)}")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **named: Any) -> None:
        """Log an exception, except for an undecodable body, which was already answered."""
        if not isinstance(named.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **named)


def _bounded_path(serve: Serve) -> Serve:
    """Return a handler that refuses a path of too many segments before it is routed."""

    async def bounded(request: web.BaseRequest) -> web.StreamResponse:
        if request.rel_url.raw_path.count("/") > MAX_SEGMENTS:
            return problem(400, f"the path has more than {MAX_SEGMENTS} segments; /openapi.json lists all paths")
        return await serve(request)

    return bounded


async def _discard(body: StreamReader) -> None:
    """Read and discard the rest of a body, up to the limits."""
    left = DISCARDED_BYTES
    with suppress(TimeoutError, web.RequestPayloadError, ConnectionError):
        async with asyncio.timeout(DISCARDED_S):
            while left > 0 and not body.is_eof():
                left -= len(await body.readany())


def _fault(error: BaseException) -> str:
    if isinstance(error, http_exceptions.LineTooLong):
        return f"its first line or a header has more than {LINE_BYTES} bytes"
    if isinstance(error, http_exceptions.InvalidURLError):
        return "its address is not as RFC 3986 has it; percent-encode it"
    if isinstance(error, http_exceptions.BadStatusLine):
        return "its first line is not METHOD /path HTTP/1.1"
    return "a header or the framing of its body is malformed"
