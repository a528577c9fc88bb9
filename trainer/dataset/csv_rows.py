"""Rows of CSV: the delimiter is found, and each unreadable row is an error in its place."""

import csv
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, dropwhile, islice
from typing import Any

from trainer.dataset import stray_quotes
from trainer.dataset.prompts import DataError

_log = logging.getLogger("trainer.dataset")
MAX_CELL = 1_000_000
DELIMITER_ROWS = 5
"""Rows that must agree on a delimiter other than the comma."""
DELIMITER_LINES = 50
"""Lines in which these rows are looked for, because a quoted cell may have several lines."""
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "bars"}
SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n?")
"""First line by which Excel names the delimiter."""
NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Characters by which Python represents bytes that it cannot decode."""


def rows(
    text: Iterable[str], where: str, check_names: Callable[[list[str], str], None]
) -> Iterator[dict[str, Any] | DataError]:
    """Yield rows as `readers.each_row`. Raises: DataError if the rest cannot be read.

    `text`: lines with their ends. `check_names`: raises DataError for a header that is too large.
    """
    csv.field_size_limit(MAX_CELL)
    reader, delimiter = _opened(iter(text), where)
    first = reader.line_num + 1
    names = _header(reader, where)
    check_names(names, f"{where} line {first}")
    while True:
        before = reader.line_num
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            yield _error(e, before + 1, reader.line_num, where)
            continue
        if not cells:
            continue
        if len(cells) != len(names):
            wrong = "more" if len(cells) > len(names) else "fewer"
            separators = "commas" if delimiter == "," else DELIMITERS.get(delimiter, f"{delimiter!r}")
            message = f"{wrong} cells than the header's {len(names)}; quote cells that hold {separators}"
            yield DataError(f"{where} line {reader.line_num}: {message}")
        elif problem := decoding_problem(cells):
            yield DataError(f"{where} line {reader.line_num}: {problem}")
        else:
            yield dict(zip(names, cells, strict=True))


def _opened(text: Iterator[str], where: str) -> tuple[Any, str]:
    """Return a reader that is at the header, and its delimiter."""
    lines, delimiter = _without_separator_line(text)
    if delimiter:
        # The reader counts the added line in place of the one that was removed.
        reader = csv.reader(chain(["\n"], lines), strict=True, delimiter=delimiter)
        next(reader)
        return reader, delimiter
    first = list(islice(lines, DELIMITER_LINES))
    table = list(dropwhile(lambda line: not line.strip(), first))
    delimiter = find_delimiter(table, is_tsv=where.lower().endswith(".tsv"))
    if delimiter != ",":
        _log.warning("%s: cells are separated by %s", where, DELIMITERS[delimiter])
    if skips := _has_spaces(table, delimiter):
        _log.warning("%s: spaces after a delimiter are left out, because quotes follow them", where)
    whole: Iterator[str] = chain(first, lines)
    if delimiter == "\t":
        whole = stray_quotes.closed(whole, where)
    return csv.reader(whole, strict=True, delimiter=delimiter, skipinitialspace=skips), delimiter


def _has_spaces(lines: list[str], delimiter: str) -> bool:
    """Return True if the first rows are CSV of one length only without the spaces before their cells."""
    if not any(f'{delimiter} "' in line for line in lines):
        return False
    as_written, without = (_widths(lines, delimiter, DELIMITER_LINES, skips_spaces=skips) for skips in (False, True))
    return len(set(without)) == 1 and len(set(as_written)) != 1


def find_delimiter(lines: list[str], *, is_tsv: bool = False) -> str:
    """Return the delimiter of a table from its first lines: the comma, unless all rows agree on another delimiter.

    Another delimiter also requires that a reading by commas fails: the header has one column, or the rows differ in
    length. Tabs do not, because texts rarely contain tabs. An upload, which has no name, is thus read like its file.
    `is_tsv`: the file's name ends in .tsv, so that a header with a tab suffices.
    """
    by_tabs = _widths(list(stray_quotes.closed(lines)), "\t", DELIMITER_ROWS)
    if by_tabs[:1] not in ([], [1]) and (is_tsv or len(set(by_tabs)) == 1 < len(by_tabs)):
        return "\t"
    by_commas = set(_widths(lines, ",", DELIMITER_ROWS))
    if _widths(lines, ",", 1) != [1] and len(by_commas) < 2:
        return ","
    for delimiter in DELIMITERS:
        widths = set(_widths(lines, delimiter, DELIMITER_ROWS))
        if len(widths) == 1 and min(widths) > 1:
            return delimiter
    return ","


def _widths(lines: list[str], delimiter: str, count: int, *, skips_spaces: bool = False) -> list[int]:
    """Return the number of cells of the first `count` rows without blank ones; empty if one is not CSV.

    A row that continues after the lines is left out, if it follows two whole rows.
    """
    widths: list[int] = []
    try:
        reader = csv.reader(lines, strict=True, delimiter=delimiter, skipinitialspace=skips_spaces)
        for cells in islice(reader, count):
            widths += [len(cells)] if cells else []
    except csv.Error as e:
        return widths if len(widths) > 1 and str(e) == "unexpected end of data" else []
    return widths


def _without_separator_line(lines: Iterator[str]) -> tuple[Iterator[str], str]:
    """Return the lines after a `sep=` line with its delimiter; without such a line all lines, and an empty text."""
    first = next(lines, "")
    named = SEPARATOR_LINE.fullmatch(first)
    return (lines, named[1]) if named else (chain([first] if first else [], lines), "")


def decoding_problem(texts: Iterable[str]) -> str | None:
    """Return what is wrong with a row that is not UTF-8, and the fix; otherwise None."""
    for text in texts:
        if not text.isascii() and (undecoded := NOT_UTF8.search(text)):
            return f"byte 0x{ord(undecoded[0]) - 0xDC00:x} is not UTF-8; save the file as UTF-8"
    return None


def _error(error: csv.Error, first: int, last: int, where: str) -> DataError:
    """Return the error of a row on lines `first` to `last`.

    Raises: DataError if the row may contain other rows. A cell with an open quote extends to the next quote, the
    end, or the cell's size limit.
    """
    if last > first or str(error) == "unexpected end of data" or str(error).startswith("field larger than"):
        lines = f"line {first}: a cell continues to line {last}" if last > first else f"line {first}"
        raise DataError(f"{where} {lines}: {error}; check the quotes of this CSV") from None
    return DataError(f"{where} line {first}: {error}; check the quotes of this CSV")


def _header(reader: Any, where: str) -> list[str]:
    """Return the header. Raises: DataError for names that are ambiguous or unreadable."""
    try:
        names: list[str] = next((cells for cells in reader if cells), [])
    except csv.Error as e:
        raise DataError(f"{where} line {reader.line_num}: {e}; check the quotes of this CSV") from None
    line = reader.line_num
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise DataError(f"{where} line {line}: the header names {repeated[0]!r} twice; rename one of the columns")
    if problem := decoding_problem(names):
        raise DataError(f"{where} line {line}: {problem}")
    return names
