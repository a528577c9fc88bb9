"""Prompt templates and their rendering, with the same code before a purchase and in training."""

import hashlib
import math
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.contract.data_config import DataConfig
from trainer.contract.suggestions import close_matches, short_list
from trainer.dataset.archives import Picture


class DataError(ValueError):
    """Error of the dataset or of a template. The message is one line that names the place and the fix."""


def digest(path: Path) -> str:
    """Return the sha256 of a file's content. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dataset_name(path: str) -> str:
    """Return the name of the dataset for messages: its file, or `data` for an upload."""
    return "data" if path.startswith("upload:") else path


def row_hash(row: Mapping[str, Any]) -> int:
    """Return a hash that is equal for rows with the same cells, to count duplicates. It differs between processes."""
    return hash(
        tuple((name, value.content if isinstance(value, Picture) else str(value)) for name, value in row.items())
    )


def bad_share_message(bad: int, rows: int, share: float, first: str) -> str | None:
    """Return the error for a dataset with this number of bad rows; None if `share` allows them.

    `first`: error of the first bad row.
    """
    if bad <= share * rows:
        return None
    return first if bad == 1 and not share else f"{first} ({bad} of {rows} rows are bad, data.bad_share is {share:g})"


def missing_column_message(name: str, columns: Iterable[str]) -> str:
    """Return the error for a setting that names a missing column, with the columns of the dataset."""
    column_list = list(columns)
    similar = close_matches(name.lower(), [c.lower() for c in column_list])
    hint = next((f"; did you mean {c!r}?" for c in column_list if similar and c.lower() == similar[0]), "")
    return f"no column {short_list([name])!r} in the data; it has {short_list(column_list)}{hint}"


def template_columns(template: str, field: str) -> tuple[str, ...]:
    """Return the columns that a template names, in order. Raises: DataError if the template cannot be parsed."""
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


def whole_column(template: str) -> str | None:
    """Return the column if the template consists of it alone; otherwise None."""
    name = template.removeprefix("{").removesuffix("}")
    return name if template == f"{{{name}}}" and not set("{}") & set(name) else None


def check_columns(config: DataConfig, columns: Iterable[str]) -> None:
    """Check that the dataset has every column that a setting names. Raises: DataError."""
    column_names = sorted(columns)
    for setting in ("prompt", "completion", "chosen", "rejected"):
        for name in template_columns(getattr(config, setting), f"data.{setting}"):
            if name not in column_names:
                raise DataError(f"data.{setting}: {missing_column_message(name, column_names)}")
    for setting in ("messages", "words", "image", "label"):
        if (name := getattr(config, setting)) and name not in column_names:
            raise DataError(f"data.{setting}: {missing_column_message(name, column_names)}")


def fill_template(template: str, cells: Mapping[str, Any]) -> str:
    """Return the template filled with the cells as text.

    `str.format` does not work, because a column may be named `0`.

    Raises: KeyError for a column that `cells` lacks.
    """
    parts = string.Formatter().parse(template)
    return "".join(literal + ("" if name is None else str(cells[name])) for literal, name, _, _ in parts)


def render(config: DataConfig, row: dict[str, Any], number: int) -> tuple[str, str]:
    """Return (prompt, completion) of a row.

    Raises: DataError naming file and row if a column is missing, null or not text.
    """
    where = f"{dataset_name(config.path)} row {number}"
    return _filled(config.prompt, row, where), _filled(config.completion, row, where)


def render_preference(config: DataConfig, row: dict[str, Any], number: int) -> tuple[str, str, str]:
    """Return (prompt, chosen answer, rejected answer) of a row. Raises: DataError as `render`."""
    where = f"{dataset_name(config.path)} row {number}"
    return tuple(_filled(t, row, where) for t in (config.prompt, config.chosen, config.rejected))  # type: ignore[return-value]


def fill_prompt(config: DataConfig, row: dict[str, Any], number: int) -> str:
    """Return the prompt of a row. Raises: DataError as `render`."""
    return _filled(config.prompt, row, f"{dataset_name(config.path)} row {number}")


def is_text(value: Any) -> bool:
    """Return True if a template may hold the cell: text or a finite number.

    Dates and decimals of Parquet are text already.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def not_text_message(column: str) -> str:
    """Return what is wrong with a cell that is not text, and the fix.

    A list or a boolean is refused, because Python's notation of it is not natural language.
    """
    return f"column {column!r} is neither text, nor a finite number, nor a date; make it text or drop the row"


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        for name in template_columns(template, "data template"):
            if row[name] is None:
                raise DataError(f"{where}: column {name!r} is null; fill it or drop the row")
            if not is_text(row[name]):
                raise DataError(f"{where}: {not_text_message(name)}")
        return fill_template(template, row)
    except KeyError as e:
        raise DataError(f"{where}: no column {e.args[0]!r}; every row needs it") from None


def held_out(rows: int, share: float) -> int:
    """Return the number of rows held out for evaluation: none, or at least one, and never all."""
    return 0 if share == 0 or rows < 2 else min(rows - 1, max(1, round(rows * share)))
