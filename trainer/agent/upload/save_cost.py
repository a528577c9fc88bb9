"""What saves take, as this attempt's own have shown: it is held against what a notice leaves."""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

LATEST = 3
"""Saves of which the quickest counts: what makes one longer is the store, or a busy machine, and passes."""


@dataclass(kw_only=True)
class Sending:
    """A snapshot on its way to the store."""

    folder: Path
    bytes: int
    whole: bool
    """All of it lies on this machine."""
    sent: int = 0
    began: float = field(default_factory=time.monotonic)

    def more(self, count: int) -> None:
        self.sent += count

    @property
    def rate(self) -> float | None:
        """Bytes/s; None before the first."""
        return self.sent / max(1e-6, time.monotonic() - self.began) if self.sent else None


class SaveCost:
    """Of one attempt."""

    def __init__(self) -> None:
        self._saves_s: deque[float] = deque(maxlen=LATEST)
        self._rates: deque[float] = deque(maxlen=LATEST)

    def saved(self, save_s: float, sending: Sending) -> None:
        """It was committed, so many seconds of work after its snapshot began."""
        self._saves_s.append(save_s)
        if sending.rate is not None:
            self._rates.append(sending.rate)

    def save_s(self, sending: Sending | None) -> float | None:
        """Seconds that a new save takes; None while nothing is known. `sending`: what is under way, whose upload alone
        is the least that another one takes.
        """
        if self._saves_s:
            return min(self._saves_s)
        return self.upload_s(sending.bytes, sending) if sending else None

    def upload_s(self, count: int, sending: Sending | None) -> float | None:
        """Seconds that so many bytes take, by the highest rate of the latest uploads and of the one under way; None
        while there is none.
        """
        own = sending.rate if sending else None
        rate = max([*self._rates, *([own] if own else [])], default=None)
        return count / rate if rate else None


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
