"""Tables that fit the terminal: what matters least is left out of a narrow one; ids, states and money stay whole."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

BORDER = 3
"""Cells that each column adds; one more closes the table."""
LINES = 2
"""Of prose in one row."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Stays whole unless it has a `least` width, from which on it folds."""

    name: str
    right: bool = False
    least: int | None = None
    """Cells."""
    prose: bool = False
    """Ends with an ellipsis after two lines; everything else that folds is there to its end."""
    rank: int = 0
    """The highest is left out first; 0 never."""


class TerminalTable:
    """A table of texts, laid out when it is printed; `total` is a last row below a line."""

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[str | Text]],
        *,
        total: Sequence[str | Text] = (),
        title: str = "",
    ) -> None:
        self._columns, self._title = columns, Text(title)
        self._rows = [[_text(cell) for cell in row] for row in rows]
        self._total = [_text(cell) for cell in total]
        shown = [*self._rows, *filter(None, [self._total])]
        self._longest = [max((cell_len(row[i].plain) for row in shown), default=0) for i in range(len(columns))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = tuple(range(len(self._columns)))
        kept, room = every, options.max_width - 1
        tight = self._needed(every, tight=False) > room
        while tight and self._needed(kept, tight=True) > room and any(self._columns[i].rank for i in kept):
            least = max(kept, key=lambda i: self._columns[i].rank)
            kept = tuple(i for i in kept if i != least)
        yield self._table(kept, self._widths(kept, room, tight=tight))
        if kept != every:
            names = ", ".join(self._columns[i].name or "bars" for i in every if i not in kept)
            yield Text(f"left out to fit: {names}; a wider terminal or --json shows them")

    def _needed(self, kept: Sequence[int], *, tight: bool) -> int:
        return sum(self._least(i, tight=tight) + BORDER for i in kept)

    def _least(self, i: int, *, tight: bool) -> int:
        full, least = self._full(i, tight=tight), self._columns[i].least
        return full if least is None else min(full, least)

    def _full(self, i: int, *, tight: bool) -> int:
        """Cells of a column's longest text; `tight` folds its head between words."""
        name = self._columns[i].name
        return max(self._longest[i], *map(cell_len, name.split() if tight else [name]), 0)

    def _widths(self, kept: Sequence[int], room: int, *, tight: bool) -> dict[int, int]:
        """Cells of each column: what is left goes to those that fold, cell by cell. Empty where all have to fold."""
        left = room - self._needed(kept, tight=tight)
        if left < 0:
            return {}
        widths = {i: self._least(i, tight=tight) for i in kept}
        while left and (growing := [i for i in kept if widths[i] < self._full(i, tight=tight)]):
            for i in growing[:left]:
                widths[i] += 1
            left -= len(growing[:left])
        return widths

    def _table(self, kept: Sequence[int], widths: Mapping[int, int]) -> Table:
        table = Table(title=self._title or None, title_justify="left")
        for column, i in ((self._columns[i], i) for i in kept):
            side: JustifyMethod = "right" if column.right else "left"
            table.add_column(column.name, justify=side, overflow="fold", width=widths.get(i))
        for row in self._rows:
            table.add_row(*(_Prose(row[i]) if self._columns[i].prose else row[i] for i in kept))
        if self._total:
            table.add_section()
            table.add_row(*(self._total[i] for i in kept))
        return table


class _Prose:
    """The first lines of a text."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self._text.wrap(console, options.max_width, overflow="fold"))
        if len(lines) > LINES:
            last = lines[LINES - 1]
            last.append("…")  # by truncate alone only where the line is full
            last.truncate(options.max_width, overflow="ellipsis")
        yield from lines[:LINES]


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
