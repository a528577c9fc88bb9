"""A large file into the store in parts: little of it is in memory at once, and nothing stays of one that breaks off."""

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
"""Bytes; S3 takes no smaller one but for the last."""
MOST_PARTS = 10_000
"""Of one object in S3."""
PIECE = 1 << 20
FOR_EACH_AT_ONCE = 64 << 20
MOST_AT_ONCE = 12
ABORT_S = 5.0


def plan(size: int) -> tuple[int, int]:
    """(bytes of a part, parts sent at once): large files need both for speed, and small ones need no memory for it."""
    part = max(PART, -(-size // MOST_PARTS))
    return part, max(1, min(MOST_AT_ONCE, size // FOR_EACH_AT_ONCE))


async def upload(
    store: ObjectStore, key: str, path: Path, size: int, sent: Callable[[int], None] = lambda count: None
) -> None:
    """`size`: of the file, in bytes. `sent`: is told of more bytes that were handed over, of which the parts on their
    way have yet to arrive. Raises BaseError, OSError; the parts are removed then, as when it is cancelled.

    A store that does not answer for `ABORT_S` keeps them until the bucket's own rule removes them.
    """
    part, at_once = plan(size)
    writer = obstore.open_writer_async(store, key, buffer_size=part, max_concurrency=at_once)
    try:
        with path.open("rb") as file:
            # The upload comes to be with its first part: cancelled in between, nobody would know its id to abort it.
            first = await asyncio.to_thread(file.read, part)
            await _settled(writer.write(first))
            sent(len(first))
            while piece := await asyncio.to_thread(file.read, PIECE):
                await writer.write(piece)
                sent(len(piece))
        await _settled(writer.close())
    except BaseException as e:
        with contextlib.suppress(BaseError, OSError):
            await _settled(writer.__aexit__(type(e), e, e.__traceback__), ABORT_S)  # aborts; it has no other name
        raise


async def _settled(call: Awaitable[Any], within_s: float = math.inf) -> None:
    """To its end, also where this task is cancelled meanwhile, however often: given up `ABORT_S` after the first time.
    Raises TimeoutError after `within_s`.
    """
    future, cancelled = asyncio.ensure_future(call), False
    until = time.monotonic() + within_s
    while not future.done() and (left := until - time.monotonic()) > 0:
        try:
            await asyncio.wait({future}, timeout=None if left == math.inf else left)
        except asyncio.CancelledError:
            until, cancelled = min(until, time.monotonic() + ABORT_S), True
    over = future.done()
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)
    if cancelled:
        raise asyncio.CancelledError
    if not over:
        raise TimeoutError
    future.result()
