"""One clock for all brokers: the database's, by which its rows are written.

What is charged, capped, expired or late is judged by times that another broker may have written. So none of them asks
its own wall clock: each carries the database's time on with its monotonic clock, and reads it anew now and then.
"""

import logging
from datetime import datetime, timedelta

from broker.domain.errors import StoreUnavailable
from broker.ports import Clock, Store
from broker.runtime.clock_skew import skewed

log = logging.getLogger(__name__)

READ_S = 15.0
"""Between two readings. A monotonic clock drifts by less than a millisecond meanwhile, unless its host is suspended."""
TRIP_S = 1.0
"""An answer that took longer is not believed: it is from some moment of that time."""
TRIES = 10
"""Readings at the start."""


class DatabaseClock:
    """`ports.Clock` of one broker process, and the controller that keeps it right. `start` comes first."""

    name = "clock"
    every_s = READ_S

    def __init__(self, store: Store, own: Clock) -> None:
        """`own`: of this host; its wall clock is only compared."""
        self._store = store
        self._own = own
        self._read: datetime | None = None
        self._read_at = 0.0
        self.skew_s = 0.0
        """How far this host's wall clock is ahead of the database's; negative: behind."""

    async def start(self) -> None:
        """The first reading. Raises StoreUnavailable."""
        for _ in range(TRIES):
            await self.step()
            if self._read is not None:
                return
        raise StoreUnavailable(f"the database needs more than {TRIP_S:g} s to say the time; check the way to it")

    def now(self) -> datetime:
        assert self._read is not None, "start() comes first"
        return self._read + timedelta(seconds=self._own.monotonic() - self._read_at)

    def monotonic(self) -> float:
        return self._own.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._own.sleep(seconds)

    async def step(self) -> bool:
        asked = self._own.monotonic()
        read = await self._store.ping()
        answered = self._own.monotonic()
        if answered - asked <= TRIP_S:
            # Somewhere between: the middle is wrong by half of the trip at most.
            self._read, self._read_at = read, (asked + answered) / 2
            self._compare()
        return False

    def _compare(self) -> None:
        before, self.skew_s = self.skew_s, (self._own.now() - self.now()).total_seconds()
        if (told := skewed(self.skew_s)) and not skewed(before):
            log.warning("clock: %s", told)
        elif not told and skewed(before):
            log.info("clock: this host's clock agrees with the database's again")
