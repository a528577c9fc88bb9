"""A clock that a test moves."""

import asyncio
import heapq
import itertools
from datetime import UTC, datetime, timedelta


class SteppedClock:
    """Clock that moves only by `advance`; sleepers wake in order."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._order), future))
        await future

    @property
    def asleep(self) -> int:
        return sum(not future.done() for _, _, future in self._sleepers)

    def advance(self, seconds: float) -> None:
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)


class InstantClock:
    """Clock whose sleepers wake at once, at the time until which they slept; `slept` has their seconds."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self._elapsed += seconds
