"""Parts of a job's log: its last lines, and lines with the time at which their chunk was written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

UNKNOWN_TIME = "-" * len("2026-01-31T12:00:00Z")


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """Part of a log that a caller wants, and its form."""

    tail: int | None = None
    """Number of last lines; None: all."""
    since: datetime | None = None
    """Earliest time at which a chunk was written; None: any."""
    timestamps: bool = False
    """True if each line begins with the time at which its chunk was written."""

    def includes(self, written_at: datetime | None) -> bool:
        """Return False if the chunk is known to be written before `since`."""
        return self.since is None or written_at is None or written_at >= self.since

    def of(self, chunks: Sequence[tuple[datetime | None, bytes]]) -> bytes:
        """Return the text of the chunks in this form."""
        log = with_times(chunks) if self.timestamps else b"".join(chunk for _, chunk in chunks)
        return log if self.tail is None else last_lines(log, self.tail)


WHOLE_LOG = LogPart()


def last_lines(log: bytes, count: int) -> bytes:
    """Return the last `count` lines of a log."""
    end = len(log) - log.endswith(b"\n")
    for _ in range(count):
        end = log.rfind(b"\n", 0, end)
        if end < 0:
            return log
    return log[end + 1 :]


def with_times(chunks: Iterable[tuple[datetime | None, bytes]]) -> bytes:
    """Return the chunks as one log. Each line begins with the time of the chunk in which it begins."""
    lines: list[bytes] = []
    is_open = False
    for at, chunk in chunks:
        prefix = f"{UNKNOWN_TIME if at is None else f'{at:%Y-%m-%dT%H:%M:%SZ}'} ".encode()
        for line in chunk.splitlines(keepends=True):
            lines.append(line if is_open else prefix + line)
            is_open = not line.endswith((b"\n", b"\r"))
    return b"".join(lines)
