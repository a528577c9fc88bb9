"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import ClientConnectionResetError, web

from broker.api.context import AUTH
from broker.domain.errors import GpubrokerError
from broker.ports import Clock

log = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
END = "end"
"""Event that closes a stream: the job rests, do not reconnect."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """`data` is one line of JSON; a message without an id does not move `Last-Event-ID`."""

    event: str
    data: str
    id: str | None = None

    def encode(self) -> bytes:
        head = f"id: {self.id}\n" if self.id is not None else ""
        return f"{head}event: {self.event}\ndata: {self.data}\n\n".encode()


async def stream(
    request: web.Request, messages: AsyncIterator[Message | None], clock: Clock, heartbeat_s: float
) -> web.StreamResponse:
    """Sends until the source ends or the client is gone. None: nothing is new; a heartbeat when it is time.

    An outage ends the stream; the client comes back with Last-Event-ID and misses nothing. The end of
    its token ends it as well.
    """
    auth, authorization = request.app[AUTH], request.headers.get("Authorization")
    headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    sent_at = clock.monotonic()
    with contextlib.suppress(ClientConnectionResetError):
        await response.prepare(request)
        await response.write(b": hello\n\n")
        try:
            async for message in messages:
                await auth.still(authorization)
                if message is None and clock.monotonic() - sent_at < heartbeat_s:
                    continue
                await response.write(b": alive\n\n" if message is None else message.encode())
                sent_at = clock.monotonic()
        except GpubrokerError as error:
            log.warning("a stream of %s was cut: %s", request.path, error)
        await response.write_eof()
    return response
