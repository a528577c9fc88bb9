"""Rate limiter of one cloud's calls by kind. Keeps the limits that the cloud states, so that the cloud refuses no call.

The gate (`broker.runtime.provider_gate`) limits calls of the port; one such call may be many requests to the cloud.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from broker.domain.errors import Throttled
from providers.skypilot.plugin.call_turns import CallSlots

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
    """Slots of the calls of one account by kind. With a folder, all processes that use it share the slots."""

    def __init__(
        self, cloud: str, limits: Mapping[str, CallLimit], clock: RateClock | None = None, folder: Path | None = None
    ) -> None:
        """`folder`: see `providers.skypilot.plugin.call_turns`; None: the slots are for this object only."""
        self._cloud, self._limits, self._clock = cloud, limits, clock or LoopClock()
        self._slots = {
            kind: CallSlots(folder / kind if folder else None, limit.calls, self._clock.monotonic)
            for kind, limit in limits.items()
        }

    def free(self, kind: str) -> int:
        """Return the number of calls of this kind that the cloud accepts now."""
        return self._slots[kind].free()

    async def turn(self, kind: str) -> float:
        """Wait for the turn of a call, and return the end of its slot.

        Raises Throttled, with nothing sent, if the wait exceeds `longest_wait_s`.
        """
        limit = self._limits[kind]
        wait_s, end = self._slots[kind].take(limit.per_s, limit.longest_wait_s)
        if end is None:
            raise Throttled(f"{self._cloud} accepts no {kind} for another {wait_s:.0f} s", after_s=wait_s)
        if wait_s:
            await self._clock.sleep(wait_s)
        return end

    def refused(self, kind: str, after_s: float, end: float | None = None) -> None:
        """Record a 429: the next call of this kind waits. Other programs may use the same account or address.

        `end`: of the refused call's slot, which is free again if refused calls do not count.
        """
        limit = self._limits[kind]
        if limit.penalty_s is None:
            self._slots[kind].refuse(max(after_s, limit.per_s / limit.calls))
        else:
            self._slots[kind].refuse(max(after_s, limit.penalty_s), end)

    async def call(self, kind: str, send: Callable[[], Awaitable[T]], *, tries: int = 1) -> T:
        """Wait for the turn, then call `send`. After a 429, pause the kind and call again, up to `tries` calls."""
        for left in reversed(range(tries)):
            end = await self.turn(kind)
            try:
                return await send()
            except Throttled as e:
                self.refused(kind, e.after_s, end)
                if not left:
                    raise
        raise AssertionError("unreachable")
