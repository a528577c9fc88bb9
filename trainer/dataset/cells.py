"""Cells other than text: chats, words, numbers, pictures; the same rules before a purchase and in training."""

import ast
import base64
import binascii
import contextlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from trainer.contract.data_config import class_name
from trainer.dataset import chats
from trainer.dataset.archives import BadArchive, Picture
from trainer.dataset.chats import BadChat, Chat
from trainer.dataset.prompts import DataError, is_text, not_text_message

KINDS = ("text", "label", "number", "flag", "chat", "turns", "words", "tags", "picture")
"""Kinds that `is_a` checks."""
INDEX = re.compile(r"\d{1,4}")
NUMBER = re.compile(r"[+-]?\d{1,18}")
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
QUOTED_START = re.compile(r"""\[\s*['"]""")
QUOTED_LIST = re.compile(rf"\[\s*(?:{QUOTED.pattern})(?:(?:\s*,\s*|\s+)(?:{QUOTED.pattern}))*\s*\]")
"""List of texts as Python or NumPy write it into a CSV cell, the latter without commas."""
NUMBER_LIST = re.compile(r"\[\s*\d+(?:\s+\d+)*\s*\]")
"""List of whole numbers as NumPy writes it."""
NO_ANSWER = "has no message of the assistant, so there is nothing to learn; add its answer or drop the row"
"""Problem of a chat without an answer, and the fix."""
FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
"""Texts of the cells that `flag` reads, in lower case."""
MAX_LABELS = 1000
"""Largest number of classes of a column."""


def label(value: Any) -> str | None:
    """Return a class as text; None for a list, a mapping, a non-finite number, or text without a visible character.

    `1`, `1.0` and `"1"` are one class.
    """
    if isinstance(value, bool):
        return str(value)
    name = class_name(value)
    return name if isinstance(name, str) and name else None


def named(label: str, labels: Sequence[str]) -> str:
    """Return the class of a label. A whole number is an index into `labels`, unless a label is a whole number."""
    if label in labels or not INDEX.fullmatch(label) or int(label) >= len(labels):
        return label
    return label if any(INDEX.fullmatch(name) for name in labels) else labels[int(label)]


def sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Return distinct classes in order: by value if all are whole numbers, otherwise by alphabet."""
    distinct = set(labels)
    if all(NUMBER.fullmatch(label) for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def number(value: Any) -> float | None:
    """Return a finite number, also from text; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and "_" in value:  # Python would read "12_3" as 123.
        return None
    try:
        converted = float(value)
    except (ValueError, OverflowError):
        return None
    return converted if math.isfinite(converted) else None


def flag(value: Any) -> bool | None:
    """Return true or false, also from 1, 0 and their text; otherwise None."""
    return FLAGS.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None


def chat(value: Any) -> Chat | None:
    """Return the chat of a cell with at least one answer of the assistant; otherwise None."""
    return None if chat_problem(value) else chats.parse(value)


def as_messages(value: Any) -> list[dict[str, Any]] | None:
    """Return messages from any role, in the form of chat templates; otherwise None."""
    parsed = asked(value)
    return None if parsed is None else parsed.messages


def asked(value: Any) -> Chat | None:
    """Return the chat of a cell, also without an answer; otherwise None."""
    try:
        return chats.parse(value)
    except BadChat:
        return None


def chat_problem(value: Any) -> str | None:
    """Return why a cell is not a chat to learn from, and the fix; None if it is one."""
    try:
        parsed = chats.parse(value)
    except BadChat as e:
        return str(e)
    if not any(message["role"] == "assistant" for message in parsed.messages):
        return NO_ANSWER
    return None


def chat_of_row(row: dict[str, Any], column: str, where: str, number_of_row: int, *, used: Iterable[str] = ()) -> Chat:
    """Return the chat of a column, with other columns for the chat template. Raises: DataError naming file and row.

    `used`: other columns that the task reads.
    """
    cell = row.get(column)
    place = f"{where} row {number_of_row}"
    if cell is None:
        raise DataError(f"{place}: no column {column!r}, or it is null; every row needs it")
    if problem := chat_problem(cell):
        raise DataError(f"{place}: column {column!r} {problem}")
    try:
        return chats.parse(cell, {key: value for key, value in row.items() if key not in {column, *used}})
    except BadChat as e:
        raise DataError(f"{place}: column {column!r} {e}") from None


def _split(value: Any) -> Any:
    """Split text into the items of a list in JSON (as in CSV) or in the notation of Python or NumPy, or at white space.

    Returns other values unchanged, and None for a list of quoted texts that is cut off.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    if QUOTED_START.match(text):
        whole = QUOTED_LIST.fullmatch(text)
        with contextlib.suppress(ValueError, SyntaxError):  # E.g. a line break within quotes.
            return [ast.literal_eval(item) for item in QUOTED.findall(text)] if whole else None
        return None
    return text[1:-1].split() if NUMBER_LIST.fullmatch(text) else text.split()


def words(value: Any) -> list[str] | None:
    """Return a list of words, also from text with white space or a JSON list; None for other values or no word."""
    split = _split(value)
    if not isinstance(split, list) or not split or not all(isinstance(w, str) and w for w in split):
        return None
    return split


def tags(value: Any) -> list[str] | None:
    """Return a list of classes, also of whole numbers, or from text as `words` reads it; otherwise None."""
    split = _split(value)
    if not isinstance(split, list) or not split:
        return None
    names = [label(part) for part in split]
    return None if None in names else cast(list[str], names)


SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"P5", b"P6")
"""First bytes of files that are read as pictures."""
SIGNATURE_BYTES = 8
SIGNATURE_CHARACTERS = 12
"""Number of base64 characters that encode the first bytes."""
Pixels = list[list[int | float | list[int | float]]]


def picture(value: Any) -> Picture | bytes | Pixels | None:
    """Return a picture, or None for other values.

    A picture is a file of an archive, an encoded picture (base64, also as `data:` URL), or pixels. Pixels are rows
    of columns of one or three numbers from 0 to 255, as a list or its JSON.
    """
    if isinstance(value, Picture):
        return value if _has_picture_signature(value) else None
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list):
        return value if _are_pixels(value) else None
    if not isinstance(value, str) or not _has_picture_signature(value):
        return None
    try:
        return base64.b64decode(_payload(value), validate=True)
    except (binascii.Error, ValueError):
        return None


def _has_picture_signature(value: Picture | str) -> bool:
    """Return True if the content begins like a picture. Raises: OSError if the machine could not read it."""
    try:
        if isinstance(value, Picture):
            start = value.start(SIGNATURE_BYTES)
        else:
            start = base64.b64decode(_payload(value)[:SIGNATURE_CHARACTERS])
    except (BadArchive, binascii.Error, ValueError):
        return False
    return start.startswith(SIGNATURES)


def _payload(text: str) -> str:
    """Return the base64 of a text, without the line breaks of MIME."""
    written = text.split(",", 1)[1] if text.startswith("data:image/") and "," in text[:64] else text
    return "".join(written.split())


def _are_pixels(rows: list[Any]) -> bool:
    """Return True for a rectangle of cells of one kind."""
    if not rows or not isinstance(rows[0], list) or not rows[0]:
        return False
    channels = len(rows[0][0]) if isinstance(rows[0][0], list) else 0
    if channels not in (0, 3):
        return False
    width = len(rows[0])
    return all(isinstance(row, list) and len(row) == width and all(_pixel(p, channels) for p in row) for row in rows)


def _pixel(value: Any, channels: int) -> bool:
    parts = value if channels else [value]
    return (
        isinstance(parts, list)
        and len(parts) == (channels or 1)
        and all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= 255 for n in parts)
    )


def is_a(kind: str, value: Any) -> bool:
    """Return True if a cell is of the given kind of KINDS."""
    match kind:
        case "text":
            return is_text(value)
        case "label":
            return label(value) is not None
        case "number":
            return number(value) is not None
        case "flag":
            return flag(value) is not None
        case "chat":
            return chat(value) is not None
        case "turns":
            return as_messages(value) is not None
        case "tags":
            return tags(value) is not None
        case "picture":
            return picture(value) is not None
    is_plain = isinstance(value, str) and not value.lstrip().startswith("[")
    return bool(value.strip()) if is_plain else words(value) is not None


def unlike_message(kind: str, column: str, *, chat_problem: str = "is not a chat; mend the row") -> str:
    """Return what is wrong with a cell that is not of the kind, and the fix."""
    match kind:
        case "chat":
            return f"column {column!r} {chat_problem}"
        case "text":
            return not_text_message(column)
        case "label":
            return f"column {column!r} is empty, or no plain text or number; fill the cell or drop the row"
        case "number":
            return f"column {column!r} is not a finite number; mend the cell or drop the row"
        case "flag":
            return f"column {column!r} is neither true nor false; write true for a good answer, false for a bad one"
        case "picture":
            return (
                f"column {column!r} is not a picture: a PNG, JPEG, WebP, BMP, GIF, TIFF or PPM file in the archive, "
                "one in base64, or rows of pixels from 0 to 255; mend or remove it"
            )
    if kind == "tags":
        return f"column {column!r} is not a list of tags; give a JSON list of names or of whole numbers"
    return f"column {column!r} is not a list of words, or one is empty; give a JSON list, or words with spaces"


def required(kind: str, row: dict[str, Any], column: str, where: str, number_of_row: int) -> Any:
    """Return the cell of a column as a value of the kind. Raises: DataError naming file and row."""
    value = row.get(column)
    if value is None:
        file = next((f" ({cell.name})" for cell in row.values() if isinstance(cell, Picture)), "")
        raise DataError(f"{where} row {number_of_row}{file}: no column {column!r}, or it is null; every row needs it")
    parse = {"label": label, "number": number, "flag": flag, "words": words, "tags": tags, "picture": picture}[kind]
    cell = parse(value)
    if cell is None:
        file = f" ({value.name})" if isinstance(value, Picture) else ""
        raise DataError(f"{where} row {number_of_row}{file}: {unlike_message(kind, column)}")
    return cell


def known_labels(row_labels: Sequence[str], labels: Sequence[str], where: str, number_of_row: int) -> list[str]:
    """Return the classes of a row's labels, which belong to the configured set; an empty set accepts all.

    Raises: DataError.
    """
    names = [named(label, labels) for label in row_labels]
    unknown = next((name for name in names if labels and name not in labels), None)
    if unknown is not None:
        raise DataError(f"{where} row {number_of_row}: {unknown_label_message(unknown, labels)}")
    return names


def unknown_label_message(label: str, labels: Sequence[str]) -> str:
    """Return what is wrong with a label outside the set, and the fix."""
    label_list = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
    return f"label {label!r} is not among data.labels ({label_list}); mend the row, or add it"


def many_labels_warning(labels: int, rows: int, column: str) -> str:
    """Return a warning if there are too many labels for the number of rows; otherwise an empty text."""
    if not labels == rows > 2:
        return ""
    return f"column {column!r} has a different label in each of {rows} rows; check that it holds classes"


def label_set_problem(labels: Sequence[str], column: str) -> str | None:
    """Return what is wrong with the labels of a column, and the fix; None if there are at least two classes."""
    if len(labels) < 2:
        return f"column {column!r} has only the label {labels[0]!r}; give at least two classes"
    if len(labels) > MAX_LABELS:
        return f"column {column!r} has {len(labels)} labels, more than {MAX_LABELS}; name a column of classes"
    return None
