"""Limits the concurrent calls of each method that needs no token. Callers without a message are dropped first."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from grpc_reflection.v1alpha import reflection

from broker.api.core.problems import TooMany

HEALTH = "grpc.health.v1.Health"
OPEN = frozenset(
    {
        *(f"/{HEALTH}/{method}" for method in ("Check", "List", "Watch")),
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
    }
)
"""Methods that need no token."""
PLACES = 64
"""Maximum number of open calls per method."""


class AnonymousCallLimit:
    """Counts open calls. At the limit, the call that has sent no message for the longest time is dropped.

    Health probes send their message at once and are never dropped.
    """

    def __init__(self) -> None:
        self._here: Counter[str] = Counter()
        self._silent: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)

    @contextmanager
    def slot(self, method: str) -> Iterator[None]:
        """Count a call during the body. Raises TooMany."""
        if self._here[method] >= PLACES:
            self._turn_out(method)
        self._here[method] += 1
        try:
            yield
        finally:
            self._here[method] -= 1

    @asynccontextmanager
    async def silent(self, method: str, seconds: float) -> AsyncIterator[None]:
        """Time out the body, which waits for the first message, after `seconds` or earlier at the limit.

        Raises TimeoutError.
        """
        async with asyncio.timeout(seconds) as timeout:
            waiting = self._silent[method]
            waiting[timeout] = None
            try:
                yield
            finally:
                waiting.pop(timeout, None)

    def _turn_out(self, method: str) -> None:
        waiting = self._silent[method]
        if not waiting:
            raise TooMany(f"{PLACES} of these calls are open already; end one of them, or ask again later")
        longest = next(iter(waiting))
        del waiting[longest]
        longest.reschedule(asyncio.get_running_loop().time())
