"""How rows are read and prompts rendered: the same code before a GPU is bought and while it trains."""

import codecs
import csv
import difflib
import io
import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.contract import archives
from trainer.contract.archives import BadArchive, Picture
from trainer.contract.train import DataConfig, DataFormat

MAX_CELL = 1_000_000
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of half a character; harmless when the other half follows."""
NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""How Python writes down a byte that it cannot decode."""


class DataError(ValueError):
    """The data set or a template is at fault; the message is one line and names the place and the fix."""


def format_of(path: str, declared: DataFormat | None) -> DataFormat:
    """The declared format, or the one that the file's ending tells. Raises DataError when neither says."""
    if declared is not None:
        return declared
    ending = path.rsplit(".", 1)[-1].lower()
    match ending:
        case "csv" | "json" | "jsonl" | "tar" | "zip":
            return ending
        case "ndjson":
            return "jsonl"
    raise DataError(f"data.path: cannot tell the format of {path!r}; set data.format to csv, json, jsonl, tar or zip")


def source(path: str) -> str:
    """How messages name the data set: by its file, or as `data` for an upload, whose name says nothing."""
    return "data" if path.startswith("upload:") else path


def read_rows(data: bytes, fmt: DataFormat) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries by column name. Raises DataError naming the line that cannot be read."""
    for row in each_row(data, fmt):
        if isinstance(row, DataError):
            raise row
        yield row


def each_row(data: bytes | Path, fmt: DataFormat, where: str = "data") -> Iterator[dict[str, Any] | DataError]:
    """As `read_rows`, with an error in the place of each row that cannot be read, so that the others still can.

    `data`: the bytes of a file, or its path. Raises DataError for a file of which nothing can be known after some
    place.
    """
    if fmt in ("tar", "zip"):
        yield from _archive_rows(data, fmt, where)
        return
    if isinstance(data, Path):
        data = data.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where}: is UTF-16; save the file as UTF-8")
    text = data.decode("utf-8-sig", "surrogateescape")
    if not text.strip():
        raise DataError(f"{where}: the file is empty; give a file with at least one row")
    match fmt:
        case "csv":
            yield from _csv_rows(text, where)
        case "json":
            yield from _json_rows(text, where)
        case "jsonl":
            yield from _jsonl_rows(text, where)


def _undecoded(texts: Iterable[str]) -> str | None:
    """What is wrong with a row of which a byte is no UTF-8, and the fix."""
    for text in texts:
        if found := NOT_UTF8.search(text):
            return f"byte 0x{ord(found[0]) - 0xDC00:x} is not UTF-8; save the file as UTF-8"
    return None


def _csv_rows(text: str, where: str) -> Iterator[dict[str, Any] | DataError]:
    csv.field_size_limit(MAX_CELL)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    torn = NOT_UTF8.search(text) is not None
    names = _csv_header(reader, where)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            broken = DataError(f"{where} line {reader.reader.line_num}: {e}; check the quotes of this CSV")
            if str(e) == "unexpected end of data":
                raise broken from None
            yield broken
            continue
        if None in row or any(v is None for v in row.values()):
            wrong = "more" if None in row else "fewer"
            message = f"{wrong} cells than the header's {len(names)}; quote cells that hold commas"
            yield DataError(f"{where} line {reader.reader.line_num}: {message}")
        elif torn and (undecoded := _undecoded(row.values())):
            yield DataError(f"{where} line {reader.reader.line_num}: {undecoded}")
        else:
            yield row


def _csv_header(reader: Any, where: str) -> list[str]:
    """Raises DataError for names that cannot be told apart or read."""
    try:
        names = list(reader.fieldnames or ())
    except csv.Error as e:
        raise DataError(f"{where} line {reader.reader.line_num}: {e}; check the quotes of this CSV") from None
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise DataError(f"{where} line 1: the header names {twice[0]!r} twice; rename one of the columns")
    if undecoded := _undecoded(names):
        raise DataError(f"{where} line 1: {undecoded}")
    return names


def _json_rows(text: str, where: str) -> Iterator[dict[str, Any] | DataError]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as e:  # ValueError alone: a number of thousands of digits
        line = getattr(e, "lineno", 1)
        message = f"not JSON ({type(e).__name__}); for one object a line use jsonl"
        raise DataError(f"{where} line {line}: {message}") from None
    if not isinstance(rows, list):
        raise DataError(f"{where}: the JSON must be a list of objects; for one object a line use jsonl")
    escapes, torn = SURROGATE.search(text) is not None, NOT_UTF8.search(text) is not None
    for number, row in enumerate(rows, 1):
        yield _object(row, f"{where} row {number}", escapes=escapes, torn=torn)


def _jsonl_rows(text: str, where: str) -> Iterator[dict[str, Any] | DataError]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028 and its like
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            yield DataError(f"{where} line {number}: not JSON; every line must be one object")
            continue
        escapes, torn = SURROGATE.search(line) is not None, NOT_UTF8.search(line) is not None
        yield _object(row, f"{where} line {number}", escapes=escapes, torn=torn)


def _object(row: Any, place: str, *, escapes: bool, torn: bool) -> dict[str, Any] | DataError:
    """The row; an error for what is no object, for a byte that is not UTF-8, and for half a surrogate pair, which no
    text can hold."""
    if not isinstance(row, dict):
        return DataError(f"{place}: is not an object; map columns to values")
    if escapes or torn:
        text = json.dumps(row, ensure_ascii=False)
        if torn and (undecoded := _undecoded((text,))):
            return DataError(f"{place}: {undecoded}")
        try:
            text.encode()
        except UnicodeEncodeError:
            return DataError(f"{place}: \\ud800 to \\udfff are halves of a character; write both, or neither")
    return row


def _archive_rows(data: bytes | Path, fmt: DataFormat, where: str) -> Iterator[dict[str, Any] | DataError]:
    """`image` and `label`, the name of the folder that the picture is in; or, of an archive with a metadata file, what
    that one says of each."""
    try:
        files = archives.files(data, fmt)
    except BadArchive as e:
        raise DataError(f"{where}: {e}") from None
    tables = [name for name in files if PurePosixPath(name).name in archives.METADATA]
    if len(tables) > 1:
        raise DataError(f"{where}: has {tables[0]!r} and {tables[1]!r}; keep one of them")
    if tables:
        yield from _described_rows(files, tables[0], where)
        return
    pictures = [files[name] for name in files if name.lower().endswith(archives.ENDINGS)]
    if not pictures:
        raise DataError(f"{where}: has no picture; pack folders of {', '.join(archives.ENDINGS)}, one for each class")
    for picture in pictures:
        yield {"image": picture, "label": PurePosixPath(picture.name).parent.name or None}


def _described_rows(files: Mapping[str, Picture], table: str, where: str) -> Iterator[dict[str, Any] | DataError]:
    try:
        text = files[table].read()
    except (BadArchive, OSError) as e:
        raise DataError(f"{where}: {table} {e}") from None
    folder = PurePosixPath(table).parent
    for number, row in enumerate(each_row(text, "csv" if table.endswith(".csv") else "jsonl", f"{where} {table}"), 1):
        if isinstance(row, DataError):
            yield row
            continue
        name = row.pop("file_name", None)
        if not isinstance(name, str) or not name:
            yield DataError(f"{where} {table} row {number}: has no file_name; name the picture, from the file's folder")
        elif (picture := files.get(str(folder / name))) is None:
            yield DataError(f"{where} {table} row {number}: the archive has no {name!r}; add it, or remove the row")
        else:
            yield {**row, "image": picture}


def identity(row: Mapping[str, Any]) -> int:
    """Equal for rows with the same cells, so that repeated ones can be counted."""
    return hash(
        tuple((name, value.content if isinstance(value, Picture) else str(value)) for name, value in row.items())
    )


def too_many(bad: int, rows: int, share: float, first: str) -> str | None:
    """Why a data set with so many rows that cannot be used is refused; None when `share` allows them. `first`: what is
    wrong with the first of them."""
    if bad <= share * rows:
        return None
    return first if bad == 1 and not share else f"{first} ({bad} of {rows} rows are bad, data.bad_share is {share:g})"


def lacking(name: str, columns: Iterable[str]) -> str:
    """For a setting that names a column which the data set lacks: which ones there are, and which one may be meant."""
    known = list(columns)
    near = difflib.get_close_matches(name.lower(), [c.lower() for c in known], n=1)
    meant = next((f"; did you mean {c!r}?" for c in known if near and c.lower() == near[0]), "")
    return f"no column {name!r} in the data; it has {', '.join(known)}{meant}"


def template_columns(template: str, field: str) -> tuple[str, ...]:
    """The columns that a template names, in order. Raises DataError for a template that cannot be parsed."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as e:
        raise DataError(f"{field}: {e}; write {{column}}, and {{{{ }}}} for literal braces") from None
    names: list[str] = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion or not name.replace("_", "a").replace("-", "a").replace(" ", "a").isalnum():
            raise DataError(f"{field}: {{{name}}} is not a plain column name; write {{column}}")
        names.append(name)
    return tuple(names)


def check_columns(config: DataConfig, columns: Iterable[str]) -> None:
    """Raises DataError when a setting names a column that the data set lacks."""
    known = sorted(columns)
    for setting in ("prompt", "completion", "chosen", "rejected"):
        for name in template_columns(getattr(config, setting), f"data.{setting}"):
            if name not in known:
                raise DataError(f"data.{setting}: {lacking(name, known)}")
    for setting in ("messages", "words", "image", "label"):
        if (name := getattr(config, setting)) and name not in known:
            raise DataError(f"data.{setting}: {lacking(name, known)}")


def fill(template: str, cells: Mapping[str, Any]) -> str:
    """The template with its columns' cells as text. Raises KeyError for a column that `cells` lacks.

    Not `str.format`: a column may be named `0`.
    """
    parts = string.Formatter().parse(template)
    return "".join(literal + ("" if name is None else str(cells[name])) for literal, name, _, _ in parts)


def render(config: DataConfig, row: dict[str, Any], number: int) -> tuple[str, str]:
    """(prompt, completion) of a row. Raises DataError naming file and row when a column is missing or null."""
    where = f"{source(config.path)} row {number}"
    return _filled(config.prompt, row, where), _filled(config.completion, row, where)


def render_preference(config: DataConfig, row: dict[str, Any], number: int) -> tuple[str, str, str]:
    """(prompt, chosen answer, rejected answer) of a row. Raises DataError as `render`."""
    where = f"{source(config.path)} row {number}"
    return tuple(_filled(t, row, where) for t in (config.prompt, config.chosen, config.rejected))  # type: ignore[return-value]


def fill_prompt(config: DataConfig, row: dict[str, Any], number: int) -> str:
    """The prompt alone. Raises DataError as `render`."""
    return _filled(config.prompt, row, f"{source(config.path)} row {number}")


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        empty = next((n for n in template_columns(template, "data template") if row[n] is None), None)
        if empty is not None:
            raise DataError(f"{where}: column {empty!r} is null; fill it or drop the row")
        return fill(template, row)
    except KeyError as e:
        raise DataError(f"{where}: no column {e.args[0]!r}; every row needs it") from None
