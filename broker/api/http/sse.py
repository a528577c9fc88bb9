"""Server-sent events (WHATWG HTML, section 9.2, https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import ClientConnectionResetError, web

from broker.api.core.auth import Unauthenticated
from broker.api.core.stream_limits import abort
from broker.api.http.context import AUTH, STREAMS
from broker.api.http.openapi import Call
from broker.domain.errors import GpubrokerError
from broker.ports import Clock

log = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
END = "end"
"""Event that closes a stream: the job has ended, and clients must not reconnect."""
CUT_S = 1.0
"""Seconds that a client may take to receive the end of a stream that the server cuts."""


@dataclass(frozen=True, kw_only=True)
class ServerSentEvent:
    """One event. `data` is one line of JSON; an event without an id does not move `Last-Event-ID`."""

    event: str
    data: str
    id: str | None = None

    def encode(self) -> bytes:
        head = f"id: {self.id}\n" if self.id is not None else ""
        return f"{head}event: {self.event}\ndata: {self.data}\n\n".encode()


async def stream(
    call: Call, messages: AsyncIterator[ServerSentEvent | None], clock: Clock, heartbeat_s: float
) -> web.StreamResponse:
    """Send events until the source ends or the client disconnects. Raises TooMany.

    None from the source means nothing new; a heartbeat is sent when due. An outage or an expired token ends the stream.
    The client reconnects with Last-Event-ID and misses nothing.
    """
    headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    request, response = call.request, web.StreamResponse(headers=headers)
    try:
        async with request.app[STREAMS].slot(call.caller, call.authorization):
            await _send(call, response, messages, clock, heartbeat_s)
    except Unauthenticated as error:
        if not response.prepared:
            raise
        log.info("a stream of %s was cut: %s", request.path, error)
        await _cut(request, response)
    return response


async def _send(
    call: Call,
    response: web.StreamResponse,
    messages: AsyncIterator[ServerSentEvent | None],
    clock: Clock,
    heartbeat_s: float,
) -> None:
    auth, sent_at = call.request.app[AUTH], clock.monotonic()
    with contextlib.suppress(ClientConnectionResetError):
        await response.prepare(call.request)
        await response.write(b": hello\n\n")
        try:
            async for message in messages:
                await auth.recheck(call.authorization)
                if message is None and clock.monotonic() - sent_at < heartbeat_s:
                    continue
                await response.write(b": alive\n\n" if message is None else message.encode())
                sent_at = clock.monotonic()
        except Unauthenticated:
            raise
        except GpubrokerError as error:
            log.warning("a stream of %s was cut: %s", call.request.path, error)
        await response.write_eof()


async def _cut(request: web.Request, response: web.StreamResponse) -> None:
    """End the response cleanly if the client still reads."""
    try:
        async with asyncio.timeout(CUT_S):
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        abort(request)
