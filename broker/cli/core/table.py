"""Tables that fit the terminal.

A narrow terminal hides the least important columns. Ids, names, states and money are never cut; no word is broken.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from broker.domain.formatting import visible

BORDER = 3
"""Terminal cells that the border adds to each column. The table's right edge takes one more cell."""
LONGEST_WORD = 40
"""Terminal cells up to which a word is never broken. A longer one may wrap, because it could need a whole line."""
PROSE_LINES = 2
"""Lines that a prose column shows in one row."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    right: bool = False
    min_width: int | None = None
    """Minimum width in terminal cells, to which the column may shrink by wrapping between words; None: the column never
    wraps.
    """
    prose: bool = False
    """True if the text ends with an ellipsis after two lines; other columns wrap the whole text."""
    cut: bool = False
    """True if the text is one line and ends with an ellipsis."""
    rank: int = 0
    """The column with the highest rank is hidden first; 0: never hidden."""


class TerminalTable:
    """A table of texts, laid out when it is printed.

    `total`: the last row, below a line. `plain`: columns are separated by spaces only, so that more columns fit.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[str | Text]],
        *,
        total: Sequence[str | Text] = (),
        title: str = "",
        plain: bool = False,
    ) -> None:
        self._plain = plain
        self._columns, self._title = columns, Text(title)
        self._rows = [[_text(cell) for cell in row] for row in rows]
        self._total = [_text(cell) for cell in total]
        shown = [*self._rows, *filter(None, [self._total])]
        self._longest = [max((cell_len(row[i].plain) for row in shown), default=0) for i in range(len(columns))]
        self._words = [_longest_word(column, (row[i].plain for row in shown)) for i, column in enumerate(columns)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = tuple(range(len(self._columns)))
        visible, available = every, options.max_width - (0 if self._plain else 1)
        tight = self._needed(every, tight=False) > available
        while tight and self._needed(visible, tight=True) > available and any(self._columns[i].rank for i in visible):
            lowest = max(visible, key=lambda i: self._columns[i].rank)
            visible = tuple(i for i in visible if i != lowest)
        yield self._table(visible, self._widths(visible, available, tight=tight), gap=self._border(tight=tight))
        if visible != every:
            names = ", ".join(self._columns[i].name or "bars" for i in every if i not in visible)
            everything = "-o wide" if self._plain else "--json"
            yield Text(f"columns hidden (terminal too narrow): {names}; {everything} has all")

    def _needed(self, visible: Sequence[int], *, tight: bool) -> int:
        return sum(self._min_width(i, tight=tight) + self._border(tight=tight) for i in visible)

    def _border(self, *, tight: bool) -> int:
        """Return the cells that separate two columns."""
        return BORDER if not self._plain else 1 if tight else 2

    def _min_width(self, i: int, *, tight: bool) -> int:
        full, min_width = self._full(i, tight=tight), self._columns[i].min_width
        return full if min_width is None else min(full, max(min_width, self._words[i]))

    def _full(self, i: int, *, tight: bool) -> int:
        """Return the cells of a column's longest text; `tight` wraps its header between words."""
        name = self._columns[i].name
        return max(self._longest[i], *map(cell_len, name.split() if tight else [name]), 0)

    def _widths(self, visible: Sequence[int], available: int, *, tight: bool) -> dict[int, int]:
        """Return the cells of each column; columns that wrap share the spare cells.

        Empty when even the minimum widths do not fit, so that every column has to wrap.
        """
        spare = available - self._needed(visible, tight=tight)
        if spare < 0:
            return {}
        widths = {i: self._min_width(i, tight=tight) for i in visible}
        while spare and (growing := [i for i in visible if widths[i] < self._full(i, tight=tight)]):
            for i in growing[:spare]:
                widths[i] += 1
            spare -= len(growing[:spare])
        return widths

    def _table(self, visible: Sequence[int], widths: Mapping[int, int], *, gap: int) -> Table:
        title = self._title or None
        table = Table(title=title, title_justify="left")
        if self._plain:
            table = Table(title=title, title_justify="left", box=None, padding=(0, gap, 0, 0), pad_edge=False)
        for column, i in ((self._columns[i], i) for i in visible):
            side: JustifyMethod = "right" if column.right else "left"
            overflow: OverflowMethod = "ellipsis" if column.cut else "fold"
            table.add_column(column.name, justify=side, overflow=overflow, no_wrap=column.cut, width=widths.get(i))
        for row in self._rows:
            table.add_row(*(_Prose(row[i]) if self._columns[i].prose else row[i] for i in visible))
        if self._total:
            table.add_section()
            table.add_row(*(self._total[i] for i in visible))
        return table


class _Prose:
    """The first lines of a text, with an ellipsis."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self._text.wrap(console, options.max_width, overflow="fold"))
        if len(lines) > PROSE_LINES:
            last = lines[PROSE_LINES - 1]
            last.append("…")  # truncate adds an ellipsis only to a full line
            last.truncate(options.max_width, overflow="ellipsis")
        yield from lines[:PROSE_LINES]


def _longest_word(column: Column, texts: Iterable[str]) -> int:
    """Return the cells of the longest word that the column does not break."""
    if column.prose or column.cut:
        return 0
    return min(LONGEST_WORD, max((cell_len(word) for text in texts for word in text.split()), default=0))


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(visible(cell))
