"""Fair limits on the requests that a daemon answers at once, by team and for callers without a token.

One sender of slow bodies could otherwise take all places, and fill the memory with parts of bodies.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from broker.api.core.problems import Overloaded, TooMany

REQUESTS_OF_TEAM = 128
"""Maximum requests of a team, streams not counted; half of the daemon's."""
ANONYMOUS_BODIES = 32
"""Maximum bodies that arrive from callers without a token."""
LARGE_BYTES = 64 * 1024
LARGE_OF_TEAM, LARGE = 16, 48
"""Maximum requests with a body over LARGE_BYTES, of a team and in all. A body has up to 4 MiB."""
WAIT_S = 1.0
"""Seconds that a request waits for a slot of the daemon. Most of a burst is refused by its team's limit within them."""
MAX_WAITING = 1024
"""Maximum requests that wait. Their bodies are not read yet."""


class DaemonSlots:
    """Limits the requests that a daemon answers at once. Requests beyond the limit wait in the order of arrival."""

    def __init__(self, limit: int, uncounted: Callable[[], int]) -> None:
        """Start with no request. `uncounted`: returns how many of the requests in progress do not count."""
        self._limit, self._uncounted = limit, uncounted
        self._used = 0
        self._waiting: dict[asyncio.Future[None], None] = {}

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises Overloaded if none is free within WAIT_S, or too many wait."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests are waiting already; try again")
        granted = asyncio.get_running_loop().create_future()
        self._waiting[granted] = None
        self._grant()
        try:
            if not granted.done():
                await asyncio.wait((granted,), timeout=WAIT_S)
                self._grant()  # A request that became a stream in the meantime has left its slot without a notice.
        except asyncio.CancelledError:
            if granted.done():
                self._leave()
            raise
        finally:
            self._waiting.pop(granted, None)
        if not granted.done():
            raise Overloaded(f"{self._limit} requests are being answered already; try again")

    def _grant(self) -> None:
        while self._waiting and self._used - self._uncounted() < self._limit:
            first = next(iter(self._waiting))
            del self._waiting[first]
            first.set_result(None)
            self._used += 1

    def _leave(self) -> None:
        self._used -= 1
        self._grant()


class RequestSlots:
    """Counts requests."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._large: Counter[str] = Counter()
        self._anonymous = 0

    @contextmanager
    def request(self, team: str, size: int | None) -> Iterator[None]:
        """Count a request of a team during the block. `size`: bytes of its body; None: unknown. Raises TooMany."""
        if self._requests[team] >= REQUESTS_OF_TEAM:
            raise TooMany(f"{REQUESTS_OF_TEAM} requests of team {team!r} run already; wait until one is answered")
        with self.large(team, size):
            self._requests[team] += 1
            try:
                yield
            finally:
                self._requests -= Counter({team: 1})

    @contextmanager
    def large(self, team: str, size: int | None) -> Iterator[None]:
        """Count a large body of a team during the block; a small body is not counted. Raises TooMany."""
        if size is not None and size <= LARGE_BYTES:
            yield
            return
        if self._large[team] >= LARGE_OF_TEAM or self._large.total() >= LARGE:
            raise TooMany(f"too many requests with more than {LARGE_BYTES >> 10} KiB run already; try again")
        self._large[team] += 1
        try:
            yield
        finally:
            self._large -= Counter({team: 1})

    @contextmanager
    def anonymous_body(self) -> Iterator[None]:
        """Count a body of a caller without a token during the block. Raises Overloaded."""
        if self._anonymous >= ANONYMOUS_BODIES:
            raise Overloaded(f"{ANONYMOUS_BODIES} bodies without a token are arriving already; try again")
        self._anonymous += 1
        try:
            yield
        finally:
            self._anonymous -= 1
