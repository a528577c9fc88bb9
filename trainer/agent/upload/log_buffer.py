"""Buffer of the child's output: redacted, split into chunks, bounded."""

import re
from collections import deque
from collections.abc import Callable, Mapping

CHUNK_BYTES = 256 << 10
HELD_BYTES = 8 << 20
TOTAL_BYTES = 64 << 20
TAIL_BYTES = 256 << 10
"""Bytes kept from the end of an output above TOTAL_BYTES, since the end may explain a failure."""
LINE_BYTES = 64 << 10
SHORTEST_SECRET = 4
LAST_CHARACTERS = 200


class Redactor:
    """Function that replaces secret values with `[redacted NAME]`, and also each line of a value of several lines."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        names: dict[str, str] = {}
        for name, value in secrets.items():
            for text in (value, *value.splitlines()):
                if len(text.strip()) >= SHORTEST_SECRET:
                    names[text.strip()] = name
        self._names = names
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(t) for t in longest_first)) if names else None
        self.longest = max((len(t.encode()) for t in names), default=0)

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda m: f"[redacted {self._names[m.group()]}]", text)


class LogBuffer:
    """Bounded buffer of raw output that yields redacted chunks. The log states what was left out."""

    def __init__(
        self,
        redact: Redactor,
        *,
        echo: Callable[[str], None] | None = None,
        max_held_bytes: int = HELD_BYTES,
        total: int = TOTAL_BYTES,
    ) -> None:
        self.redact = redact
        self._echo = echo
        self._held_limit, self._total_limit = max_held_bytes, total
        self._partial = b""
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._taken = 0
        self._dropped = 0
        self._tail: deque[bytes] | None = None
        """End of an output above the limit; None: the output is within the limit."""
        self._tail_size = 0
        self._left_out = 0
        self.last = ""
        """Last non-empty line of output, redacted and truncated."""

    def feed(self, data: bytes) -> None:
        """Add raw output; a secret that is split over two reads is still recognised."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._add_output(line)
        if len(self._partial) > LINE_BYTES + 2 * self.redact.longest:
            text = self.redact(self._partial.decode(errors="replace")).encode()
            overlap = self.redact.longest  # a secret may continue in the next read
            self._partial, text = (text[-overlap:], text[:-overlap]) if overlap else (b"", text)
            self._add(text)

    def add_line(self, line: str) -> None:
        """Add a line of the agent."""
        self._add(line.encode())

    def end(self) -> None:
        """Finish the output; a last line without a newline counts."""
        if self._partial:
            self._add_output(self._partial)
            self._partial = b""

    def _add_output(self, raw: bytes) -> None:
        """Add a line of the child."""
        if text := raw.decode(errors="replace").strip():
            self.last = self.redact(text)[:LAST_CHARACTERS]
        self._add(raw)

    def _add(self, raw: bytes) -> None:
        line = self.redact(raw.decode(errors="replace").rstrip("\r")).encode() + b"\n"
        if self._echo is not None:
            self._echo(line.decode().rstrip("\n"))
        if self._tail is None and self._taken + len(line) > self._total_limit:
            self._tail = deque()
            self._take(f"[log truncated: more than {self._total_limit >> 20} MiB in this attempt]\n".encode())
        if self._tail is None:
            self._take(line)
            return
        self._tail.append(line)
        self._tail_size += len(line)
        while self._tail_size > TAIL_BYTES and len(self._tail) > 1:
            dropped_bytes = len(self._tail.popleft())
            self._tail_size -= dropped_bytes
            self._left_out += dropped_bytes

    def close(self) -> None:
        """Finish the log, and add the end of an output above the limit."""
        for line in self._tail or ():
            if self._left_out:
                self._take(f"[log truncated: {self._left_out} bytes left out before its end]\n".encode())
                self._left_out = 0
            self._take(line)
        if self._tail:
            self._tail.clear()

    def _take(self, line: bytes) -> None:
        self._taken += len(line)
        self._lines.append(line)
        self._size += len(line)
        while self._size > self._held_limit and len(self._lines) > 1:
            dropped_line = self._lines.popleft()
            self._size -= len(dropped_line)
            self._dropped += len(dropped_line)

    def chunk(self) -> bytes:
        """Return up to 256 KiB of complete lines; empty if nothing is new."""
        out = b""
        if self._dropped:
            out = f"[log truncated: {self._dropped} bytes lost while the store could not be reached]\n".encode()
            self._dropped = 0
        while self._lines and (not out or len(out) + len(self._lines[0]) <= CHUNK_BYTES):
            line = self._lines.popleft()
            self._size -= len(line)
            out += line
        return out

    @property
    def full(self) -> bool:
        """True if a full chunk waits."""
        return self._size >= CHUNK_BYTES
