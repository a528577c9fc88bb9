"""Parts of a log that its page shows: the end, the lines around a match, the matches of a search. Pure functions."""

from collections.abc import Iterator
from dataclasses import dataclass

SHOWN_BYTES = 256 * 1024
"""Most bytes of a log on its page; the download has all."""
MATCHES = 500
"""Most matches of a search that are shown; all are counted."""
LINE_BYTES = 1000
"""Most bytes of a line that are shown as a match."""
QUERY_CHARACTERS = 200
BEFORE_LINES = 100
"""Lines that are shown before the line that a match leads to."""


@dataclass(frozen=True, kw_only=True)
class LogExcerpt:
    """Lines of a log in their order."""

    text: str
    first_line: int
    """Number of the first line, from 1."""
    is_cut: bool
    """True if the log has more lines than these."""


@dataclass(frozen=True, kw_only=True)
class LogMatch:
    """A line that contains the searched text."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class LogSearch:
    """Result of a search: the latest matches in the order of the log, and the number of all matching lines."""

    matches: tuple[LogMatch, ...]
    total: int


def log_end(raw: bytes) -> LogExcerpt:
    """Return the last whole lines of a log, at most SHOWN_BYTES."""
    start = 0 if len(raw) <= SHOWN_BYTES else raw.find(b"\n", len(raw) - SHOWN_BYTES) + 1 or len(raw) - SHOWN_BYTES
    return _part(raw, start, len(raw))


def log_around(raw: bytes, line: int) -> LogExcerpt:
    """Return the lines from BEFORE_LINES before `line` on, at most SHOWN_BYTES; past the end, the end of the log."""
    start, number = 0, 1
    for at in _line_starts(raw):
        if number >= line - BEFORE_LINES:
            break
        start, number = at, number + 1
    else:
        return log_end(raw)
    end = start + SHOWN_BYTES
    if end < len(raw):
        end = raw.rfind(b"\n", start, end) + 1 or end
    return _part(raw, start, end)


def _line_starts(raw: bytes) -> Iterator[int]:
    """Yield the start of the second line and of each later line, and the end of the last line."""
    at = 0
    while at < len(raw):
        at = raw.find(b"\n", at) + 1 or len(raw)
        yield at


def _part(raw: bytes, start: int, end: int) -> LogExcerpt:
    text = raw[start:end].decode(errors="replace")
    first = raw.count(b"\n", 0, start) + 1
    return LogExcerpt(text=text, first_line=first, is_cut=start > 0 or end < len(raw))


def log_search(raw: bytes, query: str) -> LogSearch:
    """Return the lines that contain the text, without regard to case. Only ASCII letters are folded."""
    wanted, folded = query[:QUERY_CHARACTERS].encode(errors="replace").lower(), raw.lower()
    places: list[tuple[int, int]] = []
    total, number, line_start, at = 0, 1, 0, folded.find(wanted) if wanted else -1
    while at >= 0:
        number += folded.count(b"\n", line_start, at)
        line_start = folded.rfind(b"\n", 0, at) + 1
        total += 1
        places.append((number, line_start))
        if len(places) > 2 * MATCHES:
            del places[:-MATCHES]
        end = folded.find(b"\n", at)
        at = -1 if end < 0 else folded.find(wanted, end + 1)
    matches = tuple(LogMatch(number=n, text=_line(raw, start)) for n, start in places[-MATCHES:])
    return LogSearch(matches=matches, total=total)


def _line(raw: bytes, start: int) -> str:
    end = raw.find(b"\n", start)
    end = len(raw) if end < 0 else end
    text = raw[start : min(end, start + LINE_BYTES)].decode(errors="replace")
    return text if end - start <= LINE_BYTES else f"{text}…"
