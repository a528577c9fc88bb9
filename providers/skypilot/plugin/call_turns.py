"""Turns of calls that several processes make with one account: each process waits for its own time slot.

SkyPilot's server runs each request in a process of its own, so a rate kept in memory would be kept by none of them.
"""

import fcntl
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

JITTER = 0.5
"""Largest share of an interval that is added at random.

Another program that calls at a fixed rhythm would otherwise refuse the call of the same phase again and again.
"""
MAX_AHEAD_S = 6 * 3600.0
"""A slot further ahead than these seconds is ignored. Several thousand calls may wait, so the limit is hours."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Identity of the current boot. Each boot starts the monotonic clock again, so slots of other boots are ignored."""

NO_BOOT = "-"
"""Replaces the identity on a system without one, where only `MAX_AHEAD_S` limits a slot."""

ROUNDING_S = 0.001
"""Precision of a slot in the file, in seconds."""


class CallTurns:
    """Time slots of one kind of call. A file keeps the boot and the monotonic second from which a slot is free."""

    def __init__(
        self,
        path: Path,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        boot_id: Path = BOOT_ID,
    ) -> None:
        """`interval_s`: shortest time between two calls in seconds. `jitter`: returns shares of `JITTER`."""
        self._path, self._interval_s = path, interval_s
        self._monotonic, self._sleep, self._jitter = monotonic, sleep, jitter
        self._boot = _boot(boot_id)
        self._end = 0.0
        """End of the slot that `wait` took last."""

    def wait(self) -> None:
        """Take the next free slot and sleep until it begins. Without a writable folder it returns at once."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                now = self._monotonic()
                slot = self._next_slot(file, now)
                self._end = slot + self._with_jitter(self._interval_s)
                _write(file, self._boot, self._end)
        except OSError:
            return
        if slot > now:
            self._sleep(slot - now)

    def postpone(self, seconds: float) -> None:
        """Give the slot of a refused call back: the next one begins `seconds` from now, unless other processes wait."""
        try:
            with self._path.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                now = self._monotonic()
                after, slot = now + self._with_jitter(seconds), self._next_slot(file, now)
                _write(file, self._boot, after if slot <= self._end + ROUNDING_S else max(slot, after))
        except OSError:
            return

    def _with_jitter(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._jitter())

    def _next_slot(self, file: IO[str], now: float) -> float:
        file.seek(0)
        try:
            boot, content = file.read().split()
            slot = float(content)
        except ValueError:
            return now
        return slot if boot == self._boot and now < slot <= now + MAX_AHEAD_S else now


def _boot(boot_id: Path) -> str:
    try:
        return boot_id.read_text().strip() or NO_BOOT
    except OSError:
        return NO_BOOT


def _write(file: IO[str], boot: str, slot: float) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"{boot} {slot:.3f}")
