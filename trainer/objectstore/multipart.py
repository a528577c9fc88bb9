"""Upload of a large file in parts, with little memory. After a failure the uploaded parts are removed."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

PART = 5 << 20
"""Bytes of a part; S3 accepts no smaller part except the last."""
MAX_PARTS = 10_000
"""Largest number of parts of an object in S3."""
PIECE = 1 << 20
"""Bytes that are read from the file at once."""
BYTES_PER_CONCURRENT_PART = 64 << 20
MAX_AT_ONCE = 12
"""Largest number of concurrent parts."""
ABORT_S = 5.0


def plan(size: int) -> tuple[int, int]:
    """Return (bytes of a part, concurrent parts): large files need both for speed."""
    part = max(PART, -(-size // MAX_PARTS))
    return part, max(1, min(MAX_AT_ONCE, size // BYTES_PER_CONCURRENT_PART))


async def upload(
    store: ObjectStore, key: str, path: Path, size: int, sent: Callable[[int], None] = lambda count: None
) -> None:
    """Upload a file in parts.

    `size`: bytes of the file. `sent` receives the number of bytes handed over, including parts still on their way.
    A store that does not answer for `ABORT_S` keeps the parts until the bucket's own rule removes them.

    Raises: BaseError, OSError. The parts are then removed, as after a cancellation.
    """
    part, at_once = plan(size)
    writer = obstore.open_writer_async(store, key, buffer_size=part, max_concurrency=at_once)
    try:
        with path.open("rb") as file:
            # The first part creates the upload. A cancellation in between would lose its id, so it could not be
            # aborted.
            first = await asyncio.to_thread(file.read, part)
            await _await_to_end(writer.write(first))
            sent(len(first))
            while piece := await asyncio.to_thread(file.read, PIECE):
                await writer.write(piece)
                sent(len(piece))
        await _await_to_end(writer.close())
    except BaseException as e:
        with contextlib.suppress(BaseError, OSError):
            await _await_to_end(writer.__aexit__(type(e), e, e.__traceback__), ABORT_S)  # aborts the upload
        raise


async def _await_to_end(call: Awaitable[Any], within_s: float = math.inf) -> None:
    """Await a call to its end, even if this task is cancelled meanwhile.

    The call is given up `ABORT_S` after the first cancellation.

    Raises: TimeoutError after `within_s`.
    """
    future, cancelled = asyncio.ensure_future(call), False
    until = time.monotonic() + within_s
    while not future.done() and (left := until - time.monotonic()) > 0:
        try:
            await asyncio.wait({future}, timeout=None if left == math.inf else left)
        except asyncio.CancelledError:
            until, cancelled = min(until, time.monotonic() + ABORT_S), True
    is_done = future.done()
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)
    if cancelled:
        raise asyncio.CancelledError
    if not is_done:
        raise TimeoutError
    future.result()
