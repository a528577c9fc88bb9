"""Reader of a JSON array item by item, so that it may be larger than memory."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

PIECE = 1 << 16
"""Characters read at a time; more for a longer item."""
UNCERTAIN = 32
"""Number of remaining characters below which a token may be cut off, such as `1e` or `tru`."""
MAX_ITEM = 64 << 20
"""Maximum characters of an item."""
SPACE = re.compile(r"[ \t\n\r]*")
CUT_OFF = "Unterminated string"
"""Beginning of the decoder's error for a string that is cut off, at any length."""


class NoArray(ValueError):
    """The text is not an array."""


class BadJson(ValueError):
    """The text cannot be read from here on."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, slots=True)
class Item:
    """Item of an array."""

    value: Any
    text: str
    """Item as it was written."""


def items(text: TextIO) -> Iterator[Item]:
    """Yield the items. Raises: NoArray; and BadJson at the wrong place, after the items before it."""
    window = _JsonWindow(text)
    if window.peek() != "[":
        raise NoArray
    window.step()
    if window.peek() == "]":
        window.step()
    else:
        while True:
            yield window.item()
            after = window.peek()
            if after not in (",", "]"):
                raise window.error("a comma or the end of the list is missing")
            window.step()
            if after == "]":
                break
            window.peek()
    if window.peek():
        raise window.error("there is more after the list")


class _JsonWindow:
    """Part of a text in memory: from the next item on, as far as the text was read."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._decoder = text, json.JSONDecoder()
        self._buffer, self._at, self._line, self._ended = "", 0, 1, False

    def _read_more(self) -> None:
        """Read at least as many characters as the buffer still holds, so that a long item is not parsed too often."""
        self._line += self._buffer.count("\n", 0, self._at)
        rest = self._buffer[self._at :]
        if len(rest) > MAX_ITEM:
            raise self.error(f"an item has more than {MAX_ITEM} characters")
        piece = self._text.read(max(PIECE, len(rest)))
        self._ended = not piece
        self._buffer, self._at = rest + piece, 0

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while True:
            space = SPACE.match(self._buffer, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._read_more()

    def step(self) -> None:
        """Move behind the next character."""
        self._at += 1

    def error(self, reason: str, at: int | None = None) -> BadJson:
        """Return the error for the text at an index of the buffer; None: at the next character."""
        return BadJson(self._line + self._buffer.count("\n", 0, self._at if at is None else at), reason)

    def item(self) -> Item:
        """Return the item that begins at the next character, and move behind it. Raises: BadJson."""
        while True:
            certain = len(self._buffer) if self._ended else len(self._buffer) - UNCERTAIN
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as e:
                if self._ended or (e.pos <= certain and not e.msg.startswith(CUT_OFF)):
                    raise self.error(e.msg, e.pos) from None
            except (ValueError, RecursionError) as e:  # a number of thousands of digits, or nesting too deep
                raise self.error(type(e).__name__) from None
            else:
                if end <= certain:
                    text, self._at = self._buffer[self._at : end], end
                    return Item(value, text)
            self._read_more()
