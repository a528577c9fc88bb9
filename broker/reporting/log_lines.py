"""Parts of a job's log: its last lines, and lines with the time at which their chunk was written."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

UNKNOWN_TIME = "-" * len("2026-01-31T12:00:00Z")
BLOCK_BYTES = 64 << 10
MAX_BYTES = 64 << 20
"""About the most bytes of a log with times. A log of empty lines becomes 22 times as long by its times."""


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
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        lines = log.count(b"\n", begin, end)
        if lines >= count:
            break
        count, end = count - lines, begin
    else:
        return log
    for _ in range(count):
        end = log.rfind(b"\n", begin, end)
    return log[end + 1 :]


def with_times(chunks: Sequence[tuple[datetime | None, bytes]]) -> bytes:
    """Return the chunks as one log. Each line begins with the time of the chunk in which it begins.

    Returns the last part of a log that would have more than MAX_BYTES.
    """
    texts: list[bytes] = []
    size = 0
    for place in reversed(range(len(chunks))):
        at, chunk = chunks[place]
        prefix = f"{UNKNOWN_TIME if at is None else f'{at:%Y-%m-%dT%H:%M:%SZ}'} ".encode()
        before = next((text for _, text in reversed(chunks[:place]) if text), b"\n")
        body, end = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
        text = body.replace(b"\n", b"\n" + prefix) + end
        texts.append(prefix + text if chunk and before.endswith(b"\n") else text)
        size += len(texts[-1])
        if size > MAX_BYTES and place:
            texts.append(f"(only the last {size} bytes of this log are shown)\n".encode())
            break
    return b"".join(reversed(texts))
