"""Fair limits on the requests that a daemon answers at once, by team and for callers without a token.

One sender of slow bodies could otherwise take all places, and fill the memory with parts of bodies.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from broker.api.core.problems import Overloaded, TooMany

REQUESTS_OF_TEAM = 128
"""Maximum requests of a team, streams not counted; half of the daemon's."""
ANONYMOUS_BODIES = 32
"""Maximum bodies that arrive from callers without a token."""
LARGE_BYTES = 64 * 1024
LARGE_OF_TEAM, LARGE = 16, 48
"""Maximum requests with a body over LARGE_BYTES, of a team and in all. A body has up to 4 MiB."""


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
