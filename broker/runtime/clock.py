"""Clocks of the daemon: the host's clock, and the database's clock that all brokers of an installation share.

Charges, caps, expiry and deadlines compare times that different brokers wrote, so no broker uses its own wall clock for
them. Each broker reads the database's time every `READ_S` seconds, and advances it by its monotonic clock.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta

from broker.domain.errors import StoreUnavailable
from broker.ports import Clock, Store

log = logging.getLogger(__name__)

READ_S = 15.0
"""Seconds between two readings. A monotonic clock drifts by less than 1 ms meanwhile, unless its host is suspended."""
TRIP_S = 1.0
"""Longest round trip of a reading in seconds. A slower answer is ignored, because its moment is too uncertain."""
TRIES = 10
"""Readings that `start` tries before it gives up."""
MAX_SKEW_S = 5.0
"""Largest difference in seconds between the wall clocks of host and database that is not reported."""


class SystemClock:
    """The clock of this host: wall time in UTC, monotonic time and real sleep."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class DatabaseClock:
    """`ports.Clock` of one broker process, and the controller that keeps it right. Call `start` first."""

    name = "clock"
    every_s = READ_S

    def __init__(self, store: Store, host_clock: Clock) -> None:
        """Use the monotonic time of `host_clock`; its wall time is only compared with the database's."""
        self._store = store
        self._host_clock = host_clock
        self._read: datetime | None = None
        self._read_at = 0.0
        self.skew_s = 0.0
        """Seconds by which this host's wall clock is ahead of the database's; negative: behind."""

    async def start(self) -> None:
        """Read the database's time. Raises StoreUnavailable if each of `TRIES` answers is too slow."""
        for _ in range(TRIES):
            await self.step()
            if self._read is not None:
                return
        raise StoreUnavailable(
            f"the database takes more than {TRIP_S:g} s to report its time; check the connection to it"
        )

    def now(self) -> datetime:
        assert self._read is not None, "start() comes first"
        return self._read + timedelta(seconds=self._host_clock.monotonic() - self._read_at)

    def monotonic(self) -> float:
        return self._host_clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._host_clock.sleep(seconds)

    async def step(self) -> bool:
        sent_at = self._host_clock.monotonic()
        database_time = await self._store.ping()
        answered_at = self._host_clock.monotonic()
        if answered_at - sent_at <= TRIP_S:
            # The reading happened at some moment between: the middle is wrong by at most half of the round trip.
            self._read, self._read_at = database_time, (sent_at + answered_at) / 2
            self._compare()
        return False

    def _compare(self) -> None:
        skew_before_s, self.skew_s = self.skew_s, (self._host_clock.now() - self.now()).total_seconds()
        message = clock_skew_message(self.skew_s)
        was_skewed = clock_skew_message(skew_before_s) is not None
        if message and not was_skewed:
            log.warning("clock: %s", message)
        elif not message and was_skewed:
            log.info("clock: this host's clock agrees with the database's again")


def clock_skew_message(skew_s: float) -> str | None:
    """Return one line about a wall clock that is `skew_s` seconds ahead (negative: behind); None: within MAX_SKEW_S."""
    if abs(skew_s) <= MAX_SKEW_S:
        return None
    where = "ahead of" if skew_s > 0 else "behind"
    return (
        f"this host's clock is {abs(skew_s):.0f} s {where} the database's, which is the one that counts; set it right "
        "(timedatectl set-ntp true): clouds refuse requests that are signed at a wrong time"
    )
