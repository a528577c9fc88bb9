"""Readers of rows, one after the other, so that a file may be larger than memory.

The same code runs before a purchase and in training.
"""

import codecs
import contextlib
import io
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TextIO, cast

from trainer.contract.data_config import DataFormat
from trainer.dataset import archives, csv_rows, json_stream
from trainer.dataset.archives import BadArchive, Picture
from trainer.dataset.prompts import DataError

_log = logging.getLogger("trainer.dataset")
MAX_COLUMNS, MAX_NAME = 2000, 1000
"""Maximum number of columns of a data set, and characters of a column's name."""
MAX_LINE = 64 << 20
"""Maximum characters of a line of JSON."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a row."""
UTF16 = re.compile(rb"(?:[\x01-\x7f]\0){4}|(?:\0[\x01-\x7f]){4}")
"""First bytes of UTF-16 without a byte order mark, if the text begins with ASCII."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of half a surrogate pair; harmless if the other half follows."""
ENDINGS: Mapping[str, DataFormat] = {
    "csv": "csv", "tsv": "csv", "json": "json", "jsonl": "jsonl", "ndjson": "jsonl", "parquet": "parquet", "tar": "tar",
    "zip": "zip",
}  # fmt: skip
"""Formats by the ending of a file's name."""
SPLITS = frozenset(("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"))
"""Names of folders with a part of a data set, in lower case."""
COMPRESSED = (".gz", ".tgz", ".zst", ".bz2", ".xz")
"""Endings of compressed files, which are not read."""
TABLES = frozenset(("csv", "json", "jsonl", "parquet"))
PARQUET = b"PAR1"
FOREIGN = {
    b"\x1f\x8b": "is compressed by gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it with unzstd",
    b"BZh91AY&": "is compressed by bzip2; unpack it with bunzip2",
    b"\xfd7zXZ\0": "is compressed by xz; unpack it with unxz",
    b"PK\3\4": "is a zip archive or an Excel workbook; save the sheet as CSV, or set data.format to zip",
    b"\xd0\xcf\x11\xe0": "is an Excel workbook; save the sheet as CSV",
    b"ARROW1\0\0": "is an Arrow file; write it as Parquet",
    PARQUET + b"\x15": "is a Parquet file; set data.format to parquet",
}
"""Kinds of files that are no text by their first bytes, with the fix."""
LIST_OF_OBJECTS = re.compile(rb"\[\s*\{")
FIRST_LINE = 1 << 18
"""Bytes of a file in which its form is looked for."""
PARQUET_ROWS = 256
"""Rows of Parquet in memory at a time."""
Rows = Iterator[dict[str, Any] | DataError]


def format_of(path: str, declared: DataFormat | None) -> DataFormat:
    """Return the declared format, or the format of the file's ending. Raises: DataError if neither is known."""
    data_format = declared or ENDINGS.get(path.rsplit(".", 1)[-1].lower())
    if data_format is None and path.lower().endswith(COMPRESSED):
        raise DataError(f"data.path: {path!r} is compressed; unpack it")
    if data_format is None:
        formats = "csv, json, jsonl, parquet, tar or zip"
        raise DataError(f"data.path: cannot tell the format of {path!r}; set data.format to {formats}")
    return data_format


def read_rows(data: bytes | Path, fmt: DataFormat) -> Iterator[dict[str, Any]]:
    """Yield rows as dictionaries by column name. Raises: DataError naming the line that cannot be read."""
    names: set[str] = set()
    for row in each_row(data, fmt):
        if isinstance(row, DataError):
            raise row
        if not row.keys() <= names:
            names.update(row)
            check_names(names if len(names) > MAX_COLUMNS else row, "data")
        yield row


def check_names(names: Collection[str], where: str) -> None:
    """Check the number of columns and the length of their names. Raises: DataError."""
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{where}: has more than {MAX_COLUMNS} columns; keep the columns to train on")
    if long := next((name for name in names if len(name) > MAX_NAME), None):
        raise DataError(f"{where}: column {long[:40]!r}… has a name of {len(long)} characters; use at most {MAX_NAME}")


def each_row(data: bytes | Path, fmt: DataFormat, where: str = "data") -> Rows:
    """Yield rows as `read_rows`, with an error in the place of each unreadable row.

    `data`: the bytes of a file, or its path.

    Raises: DataError if the rest of the file cannot be read.
    """
    if fmt in ("tar", "zip"):
        yield from _archive_rows(data, fmt, where)
        return
    with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as stream:
        yield from _table_rows(stream, fmt, where)


def _table_rows(stream: BinaryIO, fmt: DataFormat, where: str) -> Rows:
    if fmt == "parquet":
        yield from _parquet_rows(stream, where)
        return
    start = stream.read(8)
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or UTF16.fullmatch(start):
        raise DataError(f"{where}: is UTF-16; save the file as UTF-8")
    if foreign := next((text for first, text in FOREIGN.items() if start.startswith(first)), None):
        raise DataError(f"{where}: {foreign}")
    fmt = _actual_format(stream, fmt, where)
    if not _has_text(stream):
        raise DataError(f"{where}: the file is empty; give a file with at least one row")
    # Lines of JSON end with \n only, because its strings may hold U+2028. The CSV reader finds its own line ends.
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="" if fmt == "csv" else "\n")
    try:
        match fmt:
            case "csv":
                yield from csv_rows.rows(text, where, check_names)
            case "json":
                yield from _json_rows(text, where)
            case "jsonl":
                yield from _jsonl_rows(text, where)
    finally:
        text.detach()


def _actual_format(stream: BinaryIO, declared: DataFormat, where: str) -> DataFormat:
    """Return `json` for a list and `jsonl` for objects by line, whichever of the two is declared, and log a change."""
    if declared not in ("json", "jsonl"):
        return declared
    stream.seek(0)
    first = stream.readline(FIRST_LINE).removeprefix(codecs.BOM_UTF8).strip()
    rest = stream.read(FIRST_LINE).strip()
    actual = declared
    if declared == "json" and first.startswith(b"{") and rest.startswith(b"{") and _is_json(first):
        actual = "jsonl"
    elif declared == "jsonl" and LIST_OF_OBJECTS.match(first + b" " + rest) and not (rest and _is_json(first)):
        actual = "json"
    if actual != declared:
        form = "one object a line" if actual == "jsonl" else "one list"
        _log.warning("%s: the JSON is %s, and is read as %s", where, form, actual)
    return actual


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _has_text(stream: BinaryIO) -> bool:
    """Return True if the stream has anything but white space, and rewind it."""
    stream.seek(0)
    has_text = any(piece.removeprefix(codecs.BOM_UTF8).strip() for piece in iter(lambda: stream.read(1 << 16), b""))
    stream.seek(0)
    return has_text


def _json_rows(text: TextIO, where: str) -> Rows:
    try:
        for number, row in enumerate(json_stream.items(text), 1):
            yield _checked_object(row.value, row.text, f"{where} row {number}")
    except json_stream.NoArray:
        raise DataError(f"{where}: the JSON must be a list of objects; for one object a line use jsonl") from None
    except json_stream.BadJson as e:
        raise DataError(f"{where} line {e.line}: not JSON ({e}); for one object a line use jsonl") from None


def _jsonl_rows(text: TextIO, where: str) -> Rows:
    for number, line in enumerate(iter(lambda: text.readline(MAX_LINE + 1), ""), 1):
        if len(line) > MAX_LINE:
            raise DataError(f"{where} line {number}: has more than {MAX_LINE} characters; make the row smaller")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            yield DataError(f"{where} line {number}: not JSON; every line must be one object")
            continue
        yield _checked_object(row, line, f"{where} line {number}")


def _checked_object(row: Any, source_text: str, place: str) -> dict[str, Any] | DataError:
    """Return the row, or an error if it is not an object or not valid text.

    `source_text`: the text of the row. Errors are bytes that are not UTF-8, and half a surrogate pair, which no text
    can hold.
    """
    if not isinstance(row, dict):
        return DataError(f"{place}: is not an object; map columns to values")
    if source_text.count("[") + source_text.count("{") > MAX_DEPTH and _is_deep(row):
        return DataError(f"{place}: is nested in more than {MAX_DEPTH} levels; make it flatter")
    has_bytes = csv_rows.NOT_UTF8.search(source_text) is not None
    if has_bytes or SURROGATE.search(source_text):
        text = json.dumps(row, ensure_ascii=False)
        if has_bytes and (problem := csv_rows.decoding_problem((text,))):
            return DataError(f"{place}: {problem}")
        try:
            text.encode()
        except UnicodeEncodeError:
            return DataError(f"{place}: \\ud800 to \\udfff are halves of a character; write both, or neither")
    return row


def _is_deep(row: Any) -> bool:
    level = [row]
    for _ in range(MAX_DEPTH):
        level = [
            part for value in level for part in (value.values() if isinstance(value, dict) else value)
            if isinstance(part, dict | list)
        ]  # fmt: skip
        if not level:
            return False
    return True


def _parquet_rows(stream: BinaryIO, where: str) -> Rows:
    from arro3.io import read_parquet

    broken = f"{where}: is not a Parquet file that can be read; write it again"
    stream.seek(0, io.SEEK_END)
    size = stream.tell()
    stream.seek(max(0, size - len(PARQUET)))
    if size < 2 * len(PARQUET) or stream.read() != PARQUET:
        raise DataError(broken)
    try:
        with _without_stderr():
            batches: Any = read_parquet(cast(Any, stream), batch_size=PARQUET_ROWS)
        check_names(batches.schema.names, where)
        for batch in batches:
            columns = [[_json_value(cell.as_py()) for cell in batch[name]] for name in batch.column_names]
            for row in zip(*columns, strict=True):
                yield dict(zip(batch.column_names, row, strict=True))
    except (Exception, GeneratorExit) as e:
        if isinstance(e, (GeneratorExit, MemoryError, DataError)):
            raise
        raise DataError(f"{broken} ({_first_line(e)})") from None
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # Rust's failure, not an Exception
            raise
        raise DataError(broken) from None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what Rust writes to standard error within the block.

    Outside of the main thread this does nothing, because other threads of a daemon write there meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def _json_value(value: Any) -> Any:
    """Convert a cell to a JSON value, or to a picture: bytes alone, or in a mapping as in datasets of the Hub."""
    if isinstance(value, bytes):
        return _picture_of(value, "")
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        return _picture_of(value["bytes"], value["path"] or "")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta) else value


def _picture_of(content: bytes, name: str) -> Picture:
    return Picture(name=name, size=len(content), start=lambda count: content[:count])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _archive_rows(data: bytes | Path, fmt: DataFormat, where: str) -> Rows:
    """Yield `image` and `label`, the name of the picture's folder.

    If the archive has a metadata file, it defines the columns of each picture.
    """
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
    if not pictures and any(table_of(name) for name in files):
        yield from _rows_of_tables(files, where)
        return
    if not pictures:
        endings = ", ".join(archives.ENDINGS)
        raise DataError(f"{where}: has no picture; pack folders of {endings}, one for each class, or tables")
    _warn_of_splits(pictures, where)
    for picture in pictures:
        yield {"image": picture, "label": PurePosixPath(picture.name).parent.name or None}


def _warn_of_splits(pictures: list[Picture], where: str) -> None:
    """Log a warning if the folders above the class folders are those of a training and of another part."""
    above = {path[-3] for path in (PurePosixPath(picture.name).parts for picture in pictures) if len(path) > 2}
    parts = sorted(name for name in above if name.lower() in SPLITS)
    if len(parts) > 1:
        _log.warning("%s: has the parts %s, and all are read; pack one of them to leave the others out", where, parts)


def table_of(name: str) -> DataFormat | None:
    """Return the format of a file with rows by its name; None for any other file."""
    data_format = ENDINGS.get(name.rsplit(".", 1)[-1].lower())
    return data_format if data_format in TABLES else None


class FileRow(dict[str, Any]):
    """Row of one of several files."""

    __slots__ = ("place",)

    def __init__(self, cells: Mapping[str, Any], place: str) -> None:
        super().__init__(cells)
        self.place = place
        """File, and number of the row in it."""


def _rows_of_tables(files: Mapping[str, Picture], where: str) -> Rows:
    """Yield the rows of every table, in the order of their names."""
    for name, file in files.items():
        fmt = table_of(name)
        if fmt is None:
            continue
        try:
            with file.opened() as stream:
                for number, row in enumerate(_table_rows(stream, fmt, f"{where} {name}"), 1):
                    yield row if isinstance(row, DataError) else FileRow(row, f"{where} {name} row {number}")
        except (BadArchive, OSError) as e:
            raise DataError(f"{where} {name}: {e}") from None


def _described_rows(files: Mapping[str, Picture], table: str, where: str) -> Rows:
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
