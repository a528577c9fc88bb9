"""Rate limiter of one cloud's calls by kind. Keeps the limits that the cloud states, so that the cloud refuses no call.

The gate (`broker.runtime.provider_gate`) limits calls of the port; one such call may be many requests to the cloud.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from broker.domain.errors import Throttled

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CallLimit:
    """Limit of one kind of call."""

    calls: int
    """Calls that the cloud accepts within `per_s`."""
    per_s: float
    longest_wait_s: float
    """A call that would wait longer is not sent: Throttled."""
    penalty_s: float | None = None
    """Pause in seconds after a refused call, which does not count; None: `per_s / calls`, and refused calls count."""
    source: str


class RateClock(Protocol):
    """Monotonic seconds, and a sleep by the same clock."""

    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """Clock of the running event loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class CallRates:
    """Times of the latest calls by kind. All callers of one account share one instance."""

    def __init__(self, cloud: str, limits: Mapping[str, CallLimit], clock: RateClock | None = None) -> None:
        self._cloud, self._limits, self._clock = cloud, limits, clock or LoopClock()
        self._sent: dict[str, deque[float]] = {kind: deque(maxlen=limit.calls) for kind, limit in limits.items()}
        """Times of the latest calls; a time in the future belongs to a call that waits."""
        self._paused_until: dict[str, float] = {}

    def wait_s(self, kind: str) -> float:
        """Return the seconds until the cloud accepts another call of this kind."""
        now, limit, sent = self._clock.monotonic(), self._limits[kind], self._sent[kind]
        free_at = sent[0] + limit.per_s if len(sent) == limit.calls else now
        return max(0.0, free_at - now, self._paused_until.get(kind, now) - now)

    def free(self, kind: str) -> int:
        """Return the number of calls of this kind that the cloud accepts now."""
        now, limit = self._clock.monotonic(), self._limits[kind]
        if now < self._paused_until.get(kind, now):
            return 0
        return limit.calls - sum(now - at < limit.per_s for at in self._sent[kind])

    async def turn(self, kind: str) -> None:
        """Wait for the turn of a call. Raises Throttled, with nothing sent, if the wait exceeds `longest_wait_s`."""
        wait_s = self.wait_s(kind)
        if wait_s > self._limits[kind].longest_wait_s:
            raise Throttled(f"{self._cloud} accepts no {kind} for another {wait_s:.0f} s", after_s=wait_s)
        self._sent[kind].append(self._clock.monotonic() + wait_s)
        if wait_s:
            await self._clock.sleep(wait_s)

    def refused(self, kind: str, after_s: float) -> None:
        """Record a 429: the next call of this kind waits. Other programs may use the same account or address."""
        limit = self._limits[kind]
        penalty_s = limit.per_s / limit.calls
        if limit.penalty_s is not None:
            penalty_s = limit.penalty_s
            self._sent[kind].clear()  # a refused call does not count
        self._paused_until[kind] = self._clock.monotonic() + max(after_s, penalty_s)

    async def call(self, kind: str, send: Callable[[], Awaitable[T]], *, tries: int = 1) -> T:
        """Wait for the turn, then call `send`. After a 429, pause the kind and call again, up to `tries` calls."""
        for left in reversed(range(tries)):
            await self.turn(kind)
            try:
                return await send()
            except Throttled as e:
                self.refused(kind, e.after_s)
                if not left:
                    raise
        raise AssertionError("unreachable")
