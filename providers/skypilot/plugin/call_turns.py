"""Store of time slots for calls that several processes make with one account, and the turns of SkyPilot's processes.

The daemon (`providers.common.call_rates`) and the processes of SkyPilot's server, one per request, share the files. A
rate kept in memory would be kept by none of them.
"""

import fcntl
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

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

FOLDER_VARIABLE = "GPUBROKER_CALL_SLOTS"
"""Environment variable by which the daemon gives its folder of slots to SkyPilot's server."""


def slots_folder(home: Path) -> Path:
    """Return the folder of slots that all processes of a user share."""
    return home / ".cache" / "gpubroker" / "call-slots"


def address_folder(folder: Path, url: str) -> Path:
    """Return the folder of slots for the calls to one address of an API."""
    return folder / (re.sub(r"[^a-z0-9.]+", "-", url.lower()).strip("-") or "default")


class TakenSlot(NamedTuple):
    """Slot of a call."""

    wait_s: float
    """Seconds until the slot begins."""
    end: float | None
    """Monotonic second from which the slot is free again; None: the wait was too long, so no slot was taken."""


@dataclass(kw_only=True)
class _SlotState:
    """Slots of one kind of call, in seconds of the monotonic clock."""

    ends: list[float] = field(default_factory=list)
    """Ends of the taken slots, ascending; a slot may begin in the future."""
    paused_until: float = 0.0
    """No slot begins earlier; 0: no pause."""


class CallSlots:
    """Slots of one kind of call, of which at most `calls` overlap. A file has them for all processes.

    Without a path, or if the file cannot be written, each object has slots of its own.
    """

    def __init__(
        self,
        path: Path | None,
        calls: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
        boot_id: Path = BOOT_ID,
    ) -> None:
        self._path, self._calls, self._monotonic = path, calls, monotonic
        self._boot = _boot(boot_id)
        self._own = _SlotState()

    def take(self, length_s: float, longest_wait_s: float = inf) -> TakenSlot:
        """Take the next slot, unless the wait for it exceeds `longest_wait_s`. `length_s`: seconds of the slot."""
        with self._state() as state:
            now = self._monotonic()
            begin = self._next(state, now)
            if begin - now > longest_wait_s:
                return TakenSlot(begin - now, None)
            end = round(begin + length_s, 3)
            state.ends = sorted([*state.ends, end])[-self._calls :]
            return TakenSlot(begin - now, end)

    def refuse(self, pause_s: float, end: float | None = None) -> None:
        """Let no further slot begin for `pause_s`. `end`: of a refused call's slot, which is given back."""
        with self._state() as state:
            state.paused_until = max(state.paused_until, self._monotonic() + pause_s)
            if end is not None:
                state.ends = [other for other in state.ends if abs(other - end) > ROUNDING_S]

    def free(self) -> int:
        """Return the number of slots that may begin now."""
        with self._state() as state:
            return 0 if self._monotonic() < state.paused_until else self._calls - len(state.ends)

    def _next(self, state: _SlotState, now: float) -> float:
        return max(now, state.paused_until, state.ends[0] if len(state.ends) >= self._calls else now)

    @contextmanager
    def _state(self) -> Iterator[_SlotState]:
        """Yield the slots, locked against other processes, and store them afterwards."""
        file = self._locked_file()
        if file is None:
            self._own = self._valid(self._own.ends, self._own.paused_until)
            yield self._own
            return
        with file:
            before = file.read()
            state = self._read(before)
            yield state
            content = {"boot": self._boot, "ends": state.ends, "paused_until": round(state.paused_until, 3)}
            after = json.dumps(content).encode()
            if after != before:
                with suppress(OSError):
                    file.truncate(0)
                    file.write(after)

    def _locked_file(self) -> FileIO | None:
        """Return the file at its beginning, locked until it is closed; None: it cannot be written."""
        if self._path is None:
            return None
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self._path, "a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
            except OSError:
                file.close()
                raise
            return file
        return None

    def _read(self, content: bytes) -> _SlotState:
        """Return the stored slots; slots of another boot and unreadable ones count as free."""
        try:
            stored = json.loads(content)
            if stored["boot"] != self._boot:
                return _SlotState()
            return self._valid([float(end) for end in stored["ends"]], float(stored["paused_until"]))
        except (ValueError, TypeError, KeyError, OverflowError):
            return _SlotState()

    def _valid(self, ends: list[float], paused_until: float) -> _SlotState:
        now = self._monotonic()

        def is_ahead(at: float) -> bool:
            return isfinite(at) and now < at <= now + MAX_AHEAD_S

        ends = sorted(filter(is_ahead, ends))[-self._calls :]
        return _SlotState(ends=ends, paused_until=paused_until if is_ahead(paused_until) else 0.0)


class CallTurns:
    """Turns of one kind of call in a process that may sleep."""

    def __init__(
        self,
        path: Path,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        boot_id: Path = BOOT_ID,
        *,
        calls: int = 1,
        longest_queue_s: float = inf,
    ) -> None:
        """`interval_s`: least seconds in which `calls` calls begin. `jitter`: returns shares of `JITTER`.

        `longest_queue_s`: a slot further ahead than these seconds is not taken yet. The daemon waits for a slot no
        longer than a call of its port may take, so it must not be behind a long queue.
        """
        self._slots = CallSlots(path, calls, monotonic, boot_id)
        self._interval_s, self._calls, self._longest_queue_s = interval_s, calls, longest_queue_s
        self._sleep, self._jitter = sleep, jitter
        self._end: float | None = None
        """End of the slot that `wait` took last."""

    def wait(self) -> None:
        """Take the next free slot and sleep until it begins."""
        while True:
            jitter_s = JITTER * self._jitter() * self._interval_s / self._calls
            wait_s, self._end = self._slots.take(self._interval_s + jitter_s, self._longest_queue_s)
            if self._end is None:
                wait_s = max(wait_s - self._longest_queue_s, 0.0) + jitter_s
            if wait_s:
                self._sleep(wait_s)
            if self._end is not None:
                return

    def postpone(self, seconds: float) -> None:
        """Give the slot of a refused call back: the next one begins `seconds` from now, unless other processes wait."""
        self._slots.refuse(seconds * (1 + JITTER * self._jitter()), self._end)


def _boot(boot_id: Path) -> str:
    try:
        return boot_id.read_text().strip() or NO_BOOT
    except OSError:
        return NO_BOOT
