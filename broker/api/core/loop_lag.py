"""Lag of the event loop: by how much a timer fires late. A large lag means that a computation held the loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from aiohttp import web

EVERY_S = 0.05
"""Seconds between two measurements."""
WINDOW_S = 60.0


class LoopLag:
    """Measures the lag all the time, and keeps the largest of the last WINDOW_S seconds."""

    def __init__(self, now: Callable[[], float] = lambda: asyncio.get_running_loop().time()) -> None:
        self._now = now
        self._peaks: deque[tuple[float, float]] = deque()
        """(time, lag) of each lag that no later one exceeds."""

    def record(self, lag_s: float) -> None:
        """Record one measurement."""
        while self._peaks and self._peaks[-1][1] <= lag_s:
            self._peaks.pop()
        self._peaks.append((self._now(), lag_s))

    def largest_s(self) -> float:
        """Return the largest lag of the window in seconds; 0 without a measurement."""
        oldest = self._now() - WINDOW_S
        while self._peaks and self._peaks[0][0] < oldest:
            self._peaks.popleft()
        return self._peaks[0][1] if self._peaks else 0.0

    async def measure(self, _: web.Application) -> AsyncIterator[None]:
        """Measure while the application runs."""
        task = asyncio.create_task(self._measure())
        yield
        task.cancel()

    async def _measure(self) -> None:
        while True:
            due_at = self._now() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.record(max(0.0, self._now() - due_at))
