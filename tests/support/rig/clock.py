"""The clock of a rig that runs in real time."""

import time
from datetime import datetime, timedelta

from broker.runtime.clock import SystemClock


class StallTolerantClock(SystemClock):
    """Real clock that counts at most `MAX_S` for a stall of the host.

    Controllers read it many times a second, so between two readings more than `MAX_S` passes only in a stall.
    It counts whole microseconds, as datetimes do, so that its two times do not differ by rounding.
    """

    MAX_S = 0.25

    def __init__(self) -> None:
        self._began, self._elapsed_us, self._read_us = super().now(), 0, _host_us()

    def now(self) -> datetime:
        return self._began + timedelta(microseconds=self._read())

    def monotonic(self) -> float:
        return self._read() / 1e6

    def forward(self, seconds: float) -> None:
        """Make time pass at once."""
        self._elapsed_us += round(seconds * 1e6)

    def _read(self) -> int:
        read_us = _host_us()
        self._elapsed_us += min(read_us - self._read_us, round(self.MAX_S * 1e6))
        self._read_us = read_us
        return self._elapsed_us


def _host_us() -> int:
    return time.monotonic_ns() // 1000
