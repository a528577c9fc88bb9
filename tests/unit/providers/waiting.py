"""Waiting for something that other processes or threads do: bounded, and named when it does not happen."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(what: str, seen: Callable[[], Awaitable[bool]], *, within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not await seen():
        assert time.monotonic() < deadline, f"not seen within {within_s} s: {what}"
        await asyncio.sleep(0.005)
