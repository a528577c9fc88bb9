"""Polling for events of other processes."""

import asyncio
from collections.abc import Callable

POLL_S = 0.02
GUARD_S = 300.0
"""Seconds after which a hang ends: SkyPilot's server alone takes a minute to start on a busy machine."""


async def until(holds: Callable[[], bool], *, within_s: float = GUARD_S) -> None:
    """Wait until `holds()` is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(POLL_S)
