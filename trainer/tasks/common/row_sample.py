"""Sample of a data set's rows for checks that are too slow for all rows."""

import random
from typing import Any

RANDOM_ROWS = 3


class RowSample:
    """First row, longest row and RANDOM_ROWS random rows; the seed determines them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = self._length = 0
        self._first: tuple[int, Any] | None = None
        self._longest: tuple[int, Any] | None = None
        self._drawn: list[tuple[int, Any]] = []

    def offer(self, number: int, parsed: Any, length: int) -> None:
        """Count a parsed row. `number`: of the row, from 1. `length`: in tokens; 0 for a picture."""
        self._count += 1
        if self._first is None:
            self._first = self._longest = (number, parsed)
            self._length = length
        elif length > self._length:
            self._length, self._longest = length, (number, parsed)
        if len(self._drawn) < RANDOM_ROWS:
            self._drawn.append((number, parsed))
        elif (place := self._random.randrange(self._count)) < RANDOM_ROWS:
            self._drawn[place] = (number, parsed)

    def rows(self) -> dict[int, Any]:
        """Return the parsed rows by number, without repetitions."""
        rows: dict[int, Any] = {}
        for row in (self._first, self._longest, *self._drawn):
            if row is not None:
                rows.setdefault(*row)
        return rows
