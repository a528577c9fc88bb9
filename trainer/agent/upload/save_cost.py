"""Cost of saves as measured in this attempt, compared with the time that a notice leaves."""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

LATEST = 3
"""Number of latest saves. The fastest of them counts, because slower ones are due to the store or a busy machine."""


@dataclass(kw_only=True)
class Sending:
    """Snapshot that is being uploaded."""

    folder: Path
    bytes: int
    whole: bool
    """True if all of the snapshot is on this machine."""
    sent: int = 0
    began: float = field(default_factory=time.monotonic)

    def more(self, count: int) -> None:
        self.sent += count

    @property
    def rate(self) -> float | None:
        """Rate in bytes/s; None before the first byte."""
        return self.sent / max(1e-6, time.monotonic() - self.began) if self.sent else None


class SaveCost:
    """Cost of saves in one attempt."""

    def __init__(self) -> None:
        self._saves_s: deque[float] = deque(maxlen=LATEST)
        self._rates: deque[float] = deque(maxlen=LATEST)

    def saved(self, save_s: float, sending: Sending) -> None:
        """Record a commit, `save_s` seconds of work after its snapshot began."""
        self._saves_s.append(save_s)
        if sending.rate is not None:
            self._rates.append(sending.rate)

    def save_s(self, sending: Sending | None) -> float | None:
        """Return the expected seconds of a new save, or None if unknown.

        `sending`: the upload under way; its upload time is a lower bound.
        """
        if self._saves_s:
            return min(self._saves_s)
        return self.upload_s(sending.bytes, sending) if sending else None

    def upload_s(self, count: int, sending: Sending | None) -> float | None:
        """Return the seconds to upload `count` bytes at the highest recent rate, or None before any upload."""
        own = sending.rate if sending else None
        rate = max([*self._rates, *([own] if own else [])], default=None)
        return count / rate if rate else None


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
