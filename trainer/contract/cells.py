"""Cells that are more than text: chats, lists of words, numbers; the same rules before buying and while training."""

import math
from collections.abc import Sequence
from typing import Any

from trainer.contract.data import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
KINDS = ("label", "number", "chat", "words")
"""What `is_a` can tell."""


MOST_LABELS = 1000


def label(value: Any) -> str | None:
    """A class by its text; None for a list, a mapping, and a text without a visible character."""
    if not isinstance(value, str | int | float):
        return None
    return str(value).strip() or None


def number(value: Any) -> float | None:
    """A finite number, also as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def chat(value: Any) -> list[dict[str, Any]] | None:
    """Messages with a role and a text, one of the assistant's at least; None for anything else."""
    if not isinstance(value, list):
        return None
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return None
        if not isinstance(message.get("content"), str):
            return None
    return value if any(m["role"] == "assistant" for m in value) else None


def words(value: Any) -> list[str] | None:
    """A list of texts, or a text that white space divides; None for anything else, and for no word at all."""
    found = value.split() if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(w, str) and w for w in found):
        return None
    return found


def is_a(kind: str, value: Any) -> bool:
    """Whether a cell is of one of KINDS."""
    match kind:
        case "label":
            return label(value) is not None
        case "number":
            return number(value) is not None
        case "chat":
            return chat(value) is not None
    return bool(value.strip()) if isinstance(value, str) else words(value) is not None


def missing(kind: str, column: str) -> str:
    """What is wrong with a cell that is not of the kind, and the fix."""
    match kind:
        case "label":
            return f"column {column!r} is empty, or no plain text or number; fill the cell or drop the row"
        case "number":
            return f"column {column!r} is not a finite number; mend the cell or drop the row"
        case "chat":
            return (
                f"column {column!r} is no list of messages with role and content, one of them the assistant's; "
                "mend the row"
            )
    return f"column {column!r} is no list of words; give a JSON list, or words with spaces between them"


def taken(kind: str, row: dict[str, Any], column: str, where: str, number_of_row: int) -> Any:
    """The cell as its kind has it. Raises DataError naming file and row."""
    if row.get(column) is None:
        raise DataError(f"{where} row {number_of_row}: no column {column!r}, or it is null; every row needs it")
    found = {"label": label, "number": number, "chat": chat, "words": words}[kind](row[column])
    if found is None:
        raise DataError(f"{where} row {number_of_row}: {missing(kind, column)}")
    return found


def known(found: Sequence[str], labels: Sequence[str], where: str, number_of_row: int) -> None:
    """Raises DataError for a label outside of the set that the configuration names; empty, it has them all."""
    wrong = next((label for label in found if labels and label not in labels), None)
    if wrong is not None:
        raise DataError(f"{where} row {number_of_row}: {outside(wrong, labels)}")


def outside(label: str, labels: Sequence[str]) -> str:
    """What is wrong with a label that the set does not have, and the fix."""
    shown = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
    return f"label {label!r} is not among data.labels ({shown}); mend the row, or add it"


def bad_set(labels: Sequence[str], column: str) -> str | None:
    """What is wrong with the labels of a column, and the fix; None when there is something to tell apart."""
    if len(labels) < 2:
        return f"column {column!r} has the one label {labels[0]!r}; two at least are needed to tell apart"
    if len(labels) > MOST_LABELS:
        return f"column {column!r} has {len(labels)} labels, more than {MOST_LABELS}; is it one of classes?"
    return None
