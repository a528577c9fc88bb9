"""The clock of a rig that runs in real time."""

import time
from datetime import datetime, timedelta

from broker.runtime.clock import SystemClock


class StallTolerantClock(SystemClock):
    """A real clock on which a stall of the host takes at most `MOST_S`.

    Controllers read it many times a second, so between two readings more than `MOST_S` passes only in a stall.
    """

    MOST_S = 0.25

    def __init__(self) -> None:
        self._began, self._elapsed_s, self._read_at = super().now(), 0.0, time.monotonic()

    def now(self) -> datetime:
        return self._began + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        read_at = time.monotonic()
        self._elapsed_s += min(read_at - self._read_at, self.MOST_S)
        self._read_at = read_at
        return self._elapsed_s

    def forward(self, seconds: float) -> None:
        """Make time pass at once."""
        self._elapsed_s += seconds
