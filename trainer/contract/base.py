"""Base classes and field types of all documents and configurations."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

PATTERN_MESSAGES: dict[str, str] = {}
"""Error message for each regular expression of `matching`."""


def _plain_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character cannot be stored; remove it")
    return text


Text = Annotated[str, AfterValidator(_plain_text)]
"""Text that a database, a path and an argument list can hold."""


MAX_MESSAGE = 4000
"""Largest number of characters of a message for users."""


def _shortened(text: Any) -> Any:
    return text[: MAX_MESSAGE - 1] + "…" if isinstance(text, str) and len(text) > MAX_MESSAGE else text


Message = Annotated[str, BeforeValidator(_shortened), Field(max_length=MAX_MESSAGE)]
"""Text for users in a document. A longer text is shortened, so that it does not make the document invalid."""
Name = Annotated[str, Field(max_length=256)]
"""Id, hash or name in a document."""
ObjectPath = Annotated[str, Field(max_length=4096)]
"""Path or object key in a document."""
Number = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""Whole number in a document, in the range that every database and JSON parser can represent exactly."""


def matching(pattern: str, words: str, **rules: Any) -> Any:
    """Return a field that must match `pattern`; `words`: error message otherwise, such as `must be …`."""
    PATTERN_MESSAGES[pattern] = words
    return Field(pattern=pattern, **rules)


UNITS_S = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(
    r"(?=[0-9])"
    + "".join(rf"(?:([0-9]{{1,9}}(?:\.[0-9]{{1,6}})?) ?{unit} ?)?" for unit in ("w", "d", "h", "m(?:in)?", "s"))
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
DURATION_EXAMPLES = "90s, 15m, 2h, 1h30m or 7d"
MOMENT_EXAMPLES = "2026-01-31 or 2026-01-31T12:00:00Z"
FARTHEST_DAYS = 36_500
"""Largest number of days between now and a time that is written as a duration."""


def duration_s(text: str) -> float:
    """Return `90s`, `1h30m` or `7d` in seconds; units from weeks to seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it as {DURATION_EXAMPLES}")
    counts = zip(match.groups(), UNITS_S.values(), strict=True)
    return float(sum(Decimal(count) * unit_s for count, unit_s in counts if count))  # 1.1 * 3600 is not a whole float


def moment(text: str) -> datetime:
    """Return a date (its first second in UTC) or an ISO 8601 time with a zone. Raises ValueError."""
    try:
        at = datetime.fromisoformat(text.strip())
    except (ValueError, AttributeError):
        at = None
    if at is not None and _DATE.fullmatch(text.strip()):
        return at.replace(tzinfo=UTC)
    if at is None or at.tzinfo is None:
        raise ValueError(f"{text!r} is not a time with its zone; write it as {MOMENT_EXAMPLES}")
    return at


def moment_from(text: str, now: datetime, sign: int) -> datetime:
    """Return the time of `moment`, or `2h` before (`sign` -1) or after (`sign` 1) now. Raises ValueError."""
    try:
        return moment(text)
    except ValueError:
        pass
    try:
        span = timedelta(seconds=duration_s(text))
    except (ValueError, OverflowError):
        span = None
    if span is None or span.days > FARTHEST_DAYS:
        raise ValueError(f"{text!r} is not a time; write it as 2h, 7d, {MOMENT_EXAMPLES}")
    return now + sign * span


def _in_seconds(value: Any) -> Any:
    return duration_s(value) if isinstance(value, str) and value != "auto" and not _is_number(value) else value


def _in_days(value: Any) -> Any:
    seconds = _in_seconds(value)
    return seconds if seconds is value else seconds / UNITS_S["d"]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _AlsoText:
    """Annotation of a numeric field that also takes a duration as text, in Python and in its JSON Schema."""

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        number = handler(schema)
        if handler.mode == "serialization":
            return number
        return {"anyOf": [number, {"type": "string", "examples": ["90s", "1h30m", "7d"]}]}


InSeconds = _AlsoText(_in_seconds)
"""Lets a field of seconds also take a duration such as `2h`."""
InDays = _AlsoText(_in_days)
"""Lets a field of days also take a duration such as `12h` or `7d`."""


class Described(BaseModel):
    """Base of models whose JSON Schema shows the attribute notes as descriptions.

    The notes are read on demand, for published schemas and templates. `use_attribute_docstrings` of pydantic parses the
    source of every class at import, which takes longer than the rest of the import.
    """

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        published = handler(schema)
        properties = handler.resolve_ref_schema(published).get("properties", {})
        for name, text in descriptions(cls).items():
            alias = cls.model_fields[name].alias or name
            if alias in properties:
                properties[alias].setdefault("description", text)
        return published


@cache
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field that has one: its own, otherwise the note below the attribute."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Described) and base is not Described:
            notes = _notes(base)
            texts = {name: text for name, text in texts.items() if name not in base.__annotations__} | notes
    descriptions = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {name: text for name, text in (texts | descriptions).items() if name in model.model_fields}


def _notes(model: type[Any]) -> dict[str, str]:
    """Return the string that follows each annotated attribute in the body of the class."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError):  # a model without a source file
        return {}
    notes: dict[str, str] = {}
    for attribute, note in pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
        if not (isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name)):
            continue
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant) and isinstance(note.value.value, str):
            notes[attribute.target.id] = inspect.cleandoc(note.value.value)
    return notes


class Config(Described):
    """Base of models that users write: frozen, with attribute notes as published descriptions.

    Unknown keys are errors; so are NaN and infinite numbers, which JSON cannot represent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)


class Document(Described):
    """Base of models that programs write: frozen; keys of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
