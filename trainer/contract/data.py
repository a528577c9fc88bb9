"""How rows are read and prompts rendered: the same code before a GPU is bought and while it trains."""

import csv
import io
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.contract.train import DataConfig, DataFormat

MAX_CELL = 1_000_000
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of half a character; harmless when the other half follows."""


class DataError(ValueError):
    """The data set or a template is at fault; the message is one line and names the place and the fix."""


def format_of(path: str, declared: DataFormat | None) -> DataFormat:
    """The declared format, or the one that the file's ending tells. Raises DataError when neither says."""
    if declared is not None:
        return declared
    ending = path.rsplit(".", 1)[-1].lower()
    match ending:
        case "csv" | "json" | "jsonl":
            return ending
        case "ndjson":
            return "jsonl"
    raise DataError(f"data.path: cannot tell the format of {path!r}; set data.format to csv, json or jsonl")


def read_rows(data: bytes, fmt: DataFormat) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries by column name. Raises DataError naming the line that cannot be read."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"data: byte {e.start} is not UTF-8; save the file as UTF-8") from None
    if not text.strip():
        raise DataError("data: the file is empty; give a file with at least one row")
    match fmt:
        case "csv":
            yield from _csv_rows(text)
        case "json":
            yield from _json_rows(text)
        case "jsonl":
            yield from _jsonl_rows(text)


def _csv_rows(text: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_CELL)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        twice = [name for name, count in Counter(reader.fieldnames or ()).items() if name and count > 1]
        if twice:
            raise DataError(f"data line 1: the header names {twice[0]!r} twice; rename one of the columns")
        for row in reader:
            if None in row or any(v is None for v in row.values()):
                wrong = "more" if None in row else "fewer"
                raise DataError(
                    f"data line {reader.line_num}: {wrong} cells than the header's {len(reader.fieldnames or ())}; "
                    "quote cells that hold commas"
                )
            yield row
    except csv.Error as e:
        raise DataError(f"data line {reader.line_num}: {e}; check the quotes of this CSV") from None


def _json_rows(text: str) -> Iterator[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as e:  # ValueError alone: a number of thousands of digits
        line = getattr(e, "lineno", 1)
        raise DataError(f"data line {line}: not JSON ({type(e).__name__}); for one object a line use jsonl") from None
    if not isinstance(rows, list):
        raise DataError("data: the JSON must be a list of objects; for one object a line use jsonl")
    escapes = SURROGATE.search(text) is not None
    for number, row in enumerate(rows, 1):
        yield _object(row, f"data row {number}", escapes)


def _jsonl_rows(text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028 and its like
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"data line {number}: not JSON; every line must be one object") from None
        yield _object(row, f"data line {number}", SURROGATE.search(line) is not None)


def _object(row: Any, place: str, escapes: bool) -> dict[str, Any]:
    """The row. Raises DataError for what is no object, and for half a surrogate pair, which no text can hold."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: is not an object; map columns to values")
    if escapes:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{place}: \\ud800 to \\udfff are halves of a character; write both, or neither") from None
    return row


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


def check_templates(config: DataConfig, columns: frozenset[str]) -> None:
    """Raises DataError when a template names a column that the data set lacks."""
    for setting in ("prompt", "completion", "chosen", "rejected"):
        field = f"data.{setting}"
        for name in template_columns(getattr(config, setting), field):
            if name not in columns:
                raise DataError(f"{field}: no column {name!r} in the data; it has {', '.join(sorted(columns))}")


def fill(template: str, cells: Mapping[str, Any]) -> str:
    """The template with its columns' cells as text. Raises KeyError for a column that `cells` lacks.

    Not `str.format`: a column may be named `0`.
    """
    parts = string.Formatter().parse(template)
    return "".join(literal + ("" if name is None else str(cells[name])) for literal, name, _, _ in parts)


def render(config: DataConfig, row: dict[str, Any], number: int) -> tuple[str, str]:
    """(prompt, completion) of a row. Raises DataError naming the row when a column is missing or null."""
    return _filled(config.prompt, row, number), _filled(config.completion, row, number)


def render_preference(config: DataConfig, row: dict[str, Any], number: int) -> tuple[str, str, str]:
    """(prompt, chosen answer, rejected answer) of a row. Raises DataError as `render`."""
    return tuple(_filled(t, row, number) for t in (config.prompt, config.chosen, config.rejected))  # type: ignore[return-value]


def fill_prompt(config: DataConfig, row: dict[str, Any], number: int) -> str:
    """The prompt alone. Raises DataError as `render`."""
    return _filled(config.prompt, row, number)


def _filled(template: str, row: dict[str, Any], number: int) -> str:
    try:
        empty = next((n for n in template_columns(template, "data template") if row[n] is None), None)
        if empty is not None:
            raise DataError(f"data row {number}: column {empty!r} is null; fill it or drop the row")
        return fill(template, row)
    except KeyError as e:
        raise DataError(f"data row {number}: no column {e.args[0]!r}; every row needs it") from None
