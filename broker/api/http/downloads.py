"""Downloads: the header by which browsers save an answer as a file, and the pieces in which it is written.

Browsers never show content of a host or a user as a page of this origin.
"""

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import quote

from aiohttp import web

from broker.api.core.stream_limits import abort

WRITE_BYTES = 1024 * 1024
"""Bytes that are written at once, because the connection copies what it cannot send yet."""
TEXT = "text/plain; charset=utf-8"
"""Content type of a log."""
WRITE_S = 120.0
"""Seconds in which a client must take WRITE_BYTES: one that reads nothing would hold memory and a stream."""

NAME_CHARACTERS = 100
"""Last characters of a file's name that are kept, so that the header stays short."""
FALLBACK = "file"
"""Name of a file whose path ends in no name."""


def attachment(path: str) -> str:
    """Return the header `Content-Disposition` (RFC 6266) for the file of a path.

    `filename` serves clients that do not read `filename*`; it has only letters, digits and `._-`.
    """
    name = path.rpartition("/")[2][-NAME_CHARACTERS:] or FALLBACK
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='', errors='replace')}"


async def write_piece(response: web.StreamResponse, piece: bytes) -> None:
    """Write a part of a download. Raises ConnectionError for a client that reads too slowly."""
    view = memoryview(piece)
    for start in range(0, len(piece), WRITE_BYTES):
        try:
            async with asyncio.timeout(WRITE_S):
                await response.write(view[start : start + WRITE_BYTES])
        except TimeoutError:
            raise ConnectionAbortedError(f"the client read less than {WRITE_BYTES} bytes in {WRITE_S:g} s") from None


async def send_whole(request: web.Request, body: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
    """Answer with a body that the caller frees when this returns. An answer that was cut off drops the connection."""
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    try:
        await response.prepare(request)
        await write_piece(response, body)
        await response.write_eof()
    except BaseException:
        abort(request)
        raise
    return response
