"""Quotes that are characters of a cell, as in GLUE's TSV files, which are written without quoting.

`trainer.dataset.csv_rows` reads the lines that result.
"""

import csv
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

_log = logging.getLogger("trainer.dataset")
TAB = "\t"
NEXT_LINES = 20
"""Lines after an open quote that must all be rows, if the quote is a character."""
OPEN = "unexpected end of data"
"""Error of `csv` for a quote that a line does not close."""


def closed(lines: Iterable[str], where: str = "") -> Iterator[str]:
    """Yield the lines of a table of tabs; a cell that begins with a stray quote is quoted as a whole.

    A quote is stray if its line has a cell for each tab of the header, and the quote spoils them. If the quote stays
    open, the next lines must have the header's tabs too. `where`: name of the file for a notice; empty: no notice.
    """
    source, waiting = iter(lines), deque[str]()
    header = ""
    while not header.strip() and (header := next(source, "")):
        yield header
    tabs = header.count(TAB)
    while (line := waiting.popleft() if waiting else next(source, "")) != "":
        if not tabs or '"' not in line or line.count(TAB) != tabs or not _may_be_stray(line):
            yield line
            continue
        problem = _problem(line, tabs)
        if problem == OPEN:
            waiting.extend(islice(source, max(0, NEXT_LINES - len(waiting))))
        if not problem or (problem == OPEN and any(after.count(TAB) != tabs for after in islice(waiting, NEXT_LINES))):
            yield line
            continue
        if where:
            _log.warning("%s: quotes that no other quote closes are read as characters", where)
            where = ""
        yield _quoted(line)


def _may_be_stray(line: str) -> bool:
    return line.startswith('"') or f'{TAB}"' in line


def _problem(line: str, tabs: int) -> str:
    """Return why a line is no whole row by the rules of CSV; empty if it is one."""
    try:
        (cells,) = csv.reader([line], strict=True, delimiter=TAB)
    except csv.Error as e:
        return str(e)
    return "" if len(cells) == tabs + 1 else "other cells"


def _quoted(line: str) -> str:
    """Return a line whose cells with a stray quote at their start are quoted."""
    row = line.rstrip("\r\n")
    return TAB.join(map(_cell, row.split(TAB))) + line[len(row) :]


def _cell(text: str) -> str:
    if not text.startswith('"') or (len(text) > 1 and text.endswith('"') and '"' not in text[1:-1].replace('""', "")):
        return text
    return '"' + text.replace('"', '""') + '"'
