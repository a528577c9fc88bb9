"""Calls that need no token: a few at once of each method, and nobody keeps a place by sending nothing."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from grpc_reflection.v1alpha import reflection

from broker.api.core.problems import TooMany

HEALTH = "grpc.health.v1.Health"
OPEN = frozenset({f"/{HEALTH}/Check", f"/{HEALTH}/Watch", f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"})
"""All other methods need a token."""
PLACES = 64
"""Of each method."""


class AnonymousCallLimit:
    """Where all places are taken, one that has not said yet what it wants goes: probes come with their message."""

    def __init__(self) -> None:
        self._here: Counter[str] = Counter()
        self._silent: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)

    @contextmanager
    def one_more(self, method: str) -> Iterator[None]:
        """Raises TooMany."""
        if self._here[method] >= PLACES:
            self._turn_out(method)
        self._here[method] += 1
        try:
            yield
        finally:
            self._here[method] -= 1

    @asynccontextmanager
    async def silent(self, method: str, seconds: float) -> AsyncIterator[None]:
        """The body waits for the first message. Raises TimeoutError."""
        async with asyncio.timeout(seconds) as patience:
            waiting = self._silent[method]
            waiting[patience] = None
            try:
                yield
            finally:
                waiting.pop(patience, None)

    def _turn_out(self, method: str) -> None:
        waiting = self._silent[method]
        if not waiting:
            raise TooMany(f"{PLACES} of these calls are open already; end one of them, or ask again later")
        longest = next(iter(waiting))
        del waiting[longest]
        longest.reschedule(asyncio.get_running_loop().time())
