"""Parts of a log that its page shows: the end, the lines around a match, the matches of a search. Pure functions.

A job writes its log, so the functions work in blocks. `check` is called at each block, and raises to stop the work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import web

from broker.runtime.cpu_threads import CpuThreads

SHOWN_BYTES = 256 * 1024
"""Maximum bytes of a log on its page; the download has all."""
MATCHES = 500
"""Maximum number of matches of a search that are shown."""
COUNTED = 100_000
"""Number of matches at which a search stops, because each match takes a microsecond or more of Python."""
BLOCK_BYTES = 64 * 1024
"""Bytes of a log that one step reads: the interpreter's lock is held for no longer."""
LINE_BYTES = 1000
"""Maximum bytes of a line that are shown as a match."""
QUERY_CHARACTERS = 200
BEFORE_LINES = 100
"""Lines that are shown before the line that a match leads to."""

LOG_THREADS = web.AppKey("log_threads", CpuThreads)
"""Threads for logs alone, so that no log delays a quote, and no quote a log."""


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
    """Result of a search: the latest matches in the order of the log, and the number of matching lines."""

    matches: tuple[LogMatch, ...]
    total: int
    has_more: bool
    """True if the search stopped at `COUNTED` matches, before the start of the log."""


def _no_check() -> None:
    """Stop nothing."""


def log_end(raw: bytes, check: Callable[[], None] = _no_check) -> LogExcerpt:
    """Return the last whole lines of a log, at most SHOWN_BYTES."""
    start = 0 if len(raw) <= SHOWN_BYTES else raw.find(b"\n", len(raw) - SHOWN_BYTES) + 1 or len(raw) - SHOWN_BYTES
    return _excerpt(raw, start, len(raw), check)


def log_around(raw: bytes, line: int, check: Callable[[], None] = _no_check) -> LogExcerpt:
    """Return the lines from BEFORE_LINES before `line` on, at most SHOWN_BYTES; past the end, the end of the log."""
    start = _line_start(raw, max(line - BEFORE_LINES, 1), check)
    if start is None:
        return log_end(raw, check)
    end = start + SHOWN_BYTES
    if end < len(raw):
        end = raw.rfind(b"\n", start, end) + 1 or end
    return _excerpt(raw, start, end, check)


def _line_start(raw: bytes, number: int, check: Callable[[], None]) -> int | None:
    """Return where the line with this number, from 1, starts; None: the log has fewer lines."""
    at, missing = 0, number - 1
    while at < len(raw):
        check()
        count = raw.count(b"\n", at, at + BLOCK_BYTES)
        if count >= missing:
            for _ in range(missing):
                at = raw.find(b"\n", at) + 1
            return at if at < len(raw) else None
        at, missing = at + BLOCK_BYTES, missing - count
    return None


def _excerpt(raw: bytes, start: int, end: int, check: Callable[[], None]) -> LogExcerpt:
    text = raw[start:end].decode(errors="replace")
    first = _newlines(raw, 0, start, check) + 1
    return LogExcerpt(text=text, first_line=first, is_cut=start > 0 or end < len(raw))


def _newlines(raw: bytes, start: int, end: int, check: Callable[[], None]) -> int:
    count = 0
    for at in range(start, end, BLOCK_BYTES):
        check()
        count += raw.count(b"\n", at, min(at + BLOCK_BYTES, end))
    return count


def log_search(raw: bytes, query: str, check: Callable[[], None] = _no_check) -> LogSearch:
    """Return the lines that contain the text, without regard to case. Only ASCII letters are folded.

    The search runs from the end of the log to its start, so that the latest matches are found before it stops.
    """
    pattern = query[:QUERY_CHARACTERS].encode(errors="replace").lower()
    starts: list[int] = []
    """Starts of the latest matching lines, in descending order."""
    total = 0
    for start, end in _blocks_backward(raw) if pattern else ():
        check()
        places = _matching_lines(raw[start:end].lower(), pattern)
        total += len(places)
        starts += [start + place for place in reversed(places[-MATCHES:])][: MATCHES - len(starts)]
        if total > COUNTED:
            return LogSearch(matches=_matches(raw, starts, check), total=COUNTED, has_more=True)
    return LogSearch(matches=_matches(raw, starts, check), total=total, has_more=False)


def _blocks_backward(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of blocks of whole lines, the last block first. A longer line is in one block."""
    end = len(raw)
    while end > 0:
        start = raw.rfind(b"\n", 0, max(end - BLOCK_BYTES, 0)) + 1
        yield start, end
        end = start


def _matching_lines(block: bytes, pattern: bytes) -> list[int]:
    """Return the starts of the lines that contain `pattern`."""
    places, at = [], block.find(pattern)
    while at >= 0:
        places.append(block.rfind(b"\n", 0, at) + 1)
        end = block.find(b"\n", at)
        at = -1 if end < 0 else block.find(pattern, end + 1)
    return places


def _matches(raw: bytes, starts: list[int], check: Callable[[], None]) -> tuple[LogMatch, ...]:
    """Return the lines at these starts, which are in descending order, in the order of the log."""
    matches: list[LogMatch] = []
    number, counted_to = 1, 0
    for start in reversed(starts):
        number, counted_to = number + _newlines(raw, counted_to, start, check), start
        matches.append(LogMatch(number=number, text=_line(raw, start)))
    return tuple(matches)


def _line(raw: bytes, start: int) -> str:
    end = raw.find(b"\n", start)
    end = len(raw) if end < 0 else end
    text = raw[start : min(end, start + LINE_BYTES)].decode(errors="replace")
    return text if end - start <= LINE_BYTES else f"{text}…"
