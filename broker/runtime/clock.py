"""Clocks of the daemon: the host's clock, and the database's clock that all brokers of an installation share.

Charges, caps, expiry and deadlines compare times that different brokers wrote, so no broker uses its own wall clock for
them. Each broker reads the database's time every `READ_S` seconds, and advances it by the time that its host counts.
A reading that disagrees with the counted time is not used: see `broker.billing.trusted_time`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from broker.billing.trusted_time import ClockAnchor, is_other_step, judge_reading, step_message
from broker.domain.errors import StoreUnavailable
from broker.domain.notifications import Notice
from broker.ports import Clock, Store
from broker.runtime.boot_clock import AnchorFile

log = logging.getLogger(__name__)

READ_S = 5.0
"""Seconds between two readings. A monotonic clock drifts by less than 1 ms meanwhile, unless its host is suspended."""
TRIP_S = 1.0
"""Longest round trip of a reading in seconds. A slower answer is ignored, because its moment is too uncertain."""
TRIES = 10
"""Readings that `start` tries before it gives up."""
MAX_SKEW_S = 5.0
"""Largest difference in seconds between the wall clocks of host and database that is not reported."""
CLOCK_RIGHT = "the database's clock is right again; charges and deadlines follow it"


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

    def __init__(
        self,
        store: Store,
        host_clock: Clock,
        *,
        counted: Callable[[], float] | None = None,
        anchors: AnchorFile | None = None,
    ) -> None:
        """Use the monotonic time of `host_clock`; its wall time is only compared with the database's.

        `counted`: seconds since the host's boot; None: the monotonic time. `anchors`: the file through which a
        restarted daemon detects a step that happened before; None: the first reading is trusted.
        """
        self._store = store
        self._host_clock = host_clock
        self._counted = counted or host_clock.monotonic
        self._anchors = anchors
        self._anchor: ClockAnchor | None = None
        self._has_read = False
        self._notices: list[Notice] = []
        self._must_repair = False
        self.step_s = 0.0
        """Seconds by which the database's clock was set ahead of the trusted time (negative: back); 0: it is right."""
        self.skew_s = 0.0
        """Seconds by which this host's wall clock is ahead of the database's; negative: behind."""

    async def start(self) -> None:
        """Read the database's time. Raises StoreUnavailable if each of `TRIES` answers is too slow."""
        self._anchor = self._anchors.read() if self._anchors else None
        for _ in range(TRIES):
            await self.step()
            if self._has_read:
                self._store.use_time(self.now)
                return
        raise StoreUnavailable(
            f"the database takes more than {TRIP_S:g} s to report its time; check the connection to it"
        )

    def now(self) -> datetime:
        assert self._anchor is not None, "start() comes first"
        return self._anchor.at(self._counted())

    def monotonic(self) -> float:
        return self._host_clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._host_clock.sleep(seconds)

    async def is_right(self) -> bool:
        """Read the database's clock now, and return True if it is trusted."""
        await self.step()
        return not self.step_s

    async def step(self) -> bool:
        sent_at = self._counted()
        database_time = await self._store.ping()
        answered_at = self._counted()
        if answered_at - sent_at <= TRIP_S:
            # The reading happened at some moment between: the middle is wrong by at most half of the round trip.
            self._take(ClockAnchor(wall=database_time, counted_s=(sent_at + answered_at) / 2))
            await self._repair()
        return False

    def _take(self, reading: ClockAnchor) -> None:
        before_s, self._has_read = self.step_s, True
        trusted = judge_reading(self._anchor, reading)
        self._anchor, self.step_s = trusted.anchor, trusted.step_s
        if is_other_step(before_s, self.step_s):
            self._must_repair = True
            self._report(before_s)
        if not self.step_s:
            self._compare()
            if self._anchors:
                self._anchors.write(self._anchor)

    def _report(self, before_s: float) -> None:
        """Log a step of the database's clock, or its end, and keep a notice for users."""
        message = step_message(self.step_s)
        log.log(logging.ERROR if message else logging.INFO, "clock: %s", message or CLOCK_RIGHT)
        # All brokers of an installation see the same step: the store keeps one notice of an id.
        kind, minutes = ("stepped" if message else "restored"), round(abs(self.step_s or before_s) / 60)
        notice_id = f"clock-{kind}-{self.now():%Y%m%d%H}-{minutes}"
        self._notices.append(
            Notice(id=notice_id, kind=f"clock.{kind}", message=message or CLOCK_RIGHT, data={"step_s": self.step_s})
        )

    async def _repair(self) -> None:
        """Post the notices, and make rows due that were written with times of a wrong clock. Retried when it fails."""
        if self._must_repair:
            await self._store.repair_due_times()
            self._must_repair = False
        while self._notices:
            notice = self._notices[0]
            await self._store.post(notice)
            self._notices = [other for other in self._notices if other is not notice]

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
