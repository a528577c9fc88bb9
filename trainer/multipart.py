"""A large file into the store in parts: little of it is in memory at once, and nothing stays of one that breaks off."""

import asyncio
import contextlib
from collections.abc import Awaitable
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


async def upload(store: ObjectStore, key: str, path: Path, size: int) -> None:
    """`size`: of the file, in bytes. Raises BaseError, OSError; the parts are removed then, as when it is cancelled.

    A store that does not answer for `ABORT_S` keeps them until the bucket's own rule removes them.
    """
    part, at_once = plan(size)
    writer = obstore.open_writer_async(store, key, buffer_size=part, max_concurrency=at_once)
    try:
        with path.open("rb") as file:
            # The upload comes to be with its first part: cancelled in between, nobody would know its id to abort it.
            await _settled(writer.write(await asyncio.to_thread(file.read, part)))
            while piece := await asyncio.to_thread(file.read, PIECE):
                await writer.write(piece)
        await _settled(writer.close())
    except BaseException as e:
        with contextlib.suppress(BaseError, OSError):
            async with asyncio.timeout(ABORT_S):
                await writer.__aexit__(type(e), e, e.__traceback__)  # aborts; it has no other name
        raise


async def _settled(call: Awaitable[Any]) -> None:
    """To its end, also where this task is cancelled meanwhile, unless that takes `ABORT_S`."""
    future = asyncio.ensure_future(call)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future}, timeout=ABORT_S)
        future.cancel()
        await asyncio.gather(future, return_exceptions=True)
        raise
