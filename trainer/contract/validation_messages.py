"""Wording of validation errors with place and fix, for documents of the broker and the trainer."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.contract.base import PATTERN_MESSAGES
from trainer.contract.suggestions import close_matches

MAX_ERRORS = 50
MAX_FAULTS = 1000
"""Faults of a document beyond which no fault is worded, because even listing them takes seconds."""
MESSAGE_CHARACTERS, PLACE_CHARACTERS = 1000, 200
PLAIN = {
    "tuple": "list",
    "Tuple": "list",
    "valid list": "list such as [a, b]",
    "valid dictionary": "mapping of keys to values",
    " or object to extract fields from": "",
    ", unable to parse string as a number": "",
    ", unable to parse string as an integer": "",
}
LENGTH = re.compile(r"^\w+ should have at (least|most) (\d+) (?:item|character)s?(?: after validation.*)?$")
TAG = re.compile(r"^Input tag '(.*)' found using '(\w+)' does not match any of the expected tags: (.*)$", re.DOTALL)
TAGLESS = re.compile(r"^Unable to extract tag using discriminator '(\w+)'$")
NEVER_ECHOED = ("env", "secrets", "value", "blob_options", "database_url")
"""Top-level fields whose values may be confidential; errors do not repeat them."""


def error_messages(error: ValidationError, model: type[BaseModel], document: Any) -> dict[str, str]:
    """Return error messages by place; the empty place is the whole document. `document`: the input as plain objects."""
    if error.error_count() > MAX_FAULTS:
        return {"": f"has {error.error_count()} faults; the first thing to check is whether it is the right document"}
    merged: dict[str, list[str]] = {}
    for detail in _without_follow_ups(error.errors(include_url=False)):
        path = _path(detail, document)
        place = _cut(".".join(map(str, path)), PLACE_CHARACTERS)
        if place not in merged and len(merged) == MAX_ERRORS:
            continue  # wording is slow, and a request may hold hundreds of thousands of errors
        text = _cut(_message(detail, path, model), MESSAGE_CHARACTERS)
        messages = merged.setdefault(place, [])
        if text not in messages:
            messages.append(text)
    return {place: ", or ".join(messages) for place, messages in merged.items()}


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def value_error_message(error: ValidationError) -> str:
    """Return the error message of a value that is not part of a document."""
    return _cut(_plain_message(error.errors(include_url=False)[0], echoed=True), MESSAGE_CHARACTERS)


def _without_follow_ups(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop errors of lists that are too short only because their wrong items were not counted."""
    if all(detail["type"] != "too_short" for detail in details):
        return details
    above = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in above]


def _path(detail: ErrorDetails, document: Any) -> tuple[int | str, ...]:
    """Return pydantic's location without the names of union branches, which are not part of the input."""
    path: list[int | str] = []
    part_of_document = document
    for i, part in enumerate(detail["loc"]):
        child = _step(part_of_document, part)
        if child is not None:
            part_of_document = child[0]
        elif not (detail["type"] == "missing" and i == len(detail["loc"]) - 1):
            continue
        path.append(part)
    return tuple(path)


def _step(node: Any, part: int | str) -> tuple[Any] | None:
    if isinstance(node, Mapping) and part in node:
        return (node[part],)
    if isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
        return (node[part],)
    return None


def _message(detail: ErrorDetails, path: tuple[int | str, ...], model: type[BaseModel]) -> str:
    match detail["type"]:
        case "extra_forbidden":
            key = str(path[-1]) if path else ""
            return _unknown_key_message(key, _known_keys(model, path[:-1]), _places(model).get(key))
        case "missing":
            return "is missing; add it"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case "union_tag_not_found":
            return TAGLESS.sub(r"\1 is missing; add it", detail["msg"])
        case "union_tag_invalid":
            return TAG.sub(r"\2 must be one of \3, not '\1'", detail["msg"])
    text = _plain_message(detail, echoed=not (path and path[0] in NEVER_ECHOED))
    if detail["type"] == "model_attributes_type" and (known := _known_keys(model, path)):
        return text.replace("of keys to values", f"such as {{{'kind' if 'kind' in known else known[0]}: …}}", 1)
    return text


def _plain_message(detail: ErrorDetails, *, echoed: bool) -> str:
    text = PATTERN_MESSAGES.get(detail.get("ctx", {}).get("pattern", ""), detail["msg"])
    text = text.replace("Input should be", "must be").replace("Input should", "must")
    for python, plain in PLAIN.items():
        text = text.replace(python, plain)
    text = LENGTH.sub(partial(_length_message, "character" if isinstance(detail["input"], str) else "item"), text)
    text = text[:1].lower() + text[1:]
    value = detail["input"]
    if isinstance(value, str | int | float | bool) and echoed:
        value_text = json.dumps(value[:61] if isinstance(value, str) else value)
        text += f", not {value_text if len(value_text) <= 60 else value_text[:57] + '...'}"
    return text


def _length_message(unit: str, match: re.Match[str]) -> str:
    return f"must have at {match[1]} {match[2]} {unit}{'' if match[2] == '1' else 's'}"


def _unknown_key_message(key: str, known: tuple[str, ...], place: str | None) -> str:
    """Return the message for a key. `known`: keys that are allowed there; `place`: where the key is allowed."""
    if place is not None:
        return f"unknown key here; did you mean {place}{'' if '.' in place else ' at the top level'}?"
    near = close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; remove it, or use one of {', '.join(known)}" if known else "unknown key; remove it"


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


@cache
def _places(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the place of each key of `model` at the top level, and of those below it that occur once."""
    outer = _known_keys(model, ())
    below = [(name, f"{section}.{name}") for section in outer for name in _known_keys(model, (section,))]
    counts = Counter(name for name, _ in below)
    return {name: place for name, place in below if counts[name] == 1} | {name: name for name in outer}


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys that `model` allows at a path of its input."""
    top = _schema(model)
    places = list(_branches(top, top))
    for part in path:
        inner = [p.get("items") if isinstance(part, int) else p.get("properties", {}).get(part) for p in places]
        places = [b for step in inner if step is not None for b in _branches(step, top)]
    return tuple(dict.fromkeys(k for p in places for k in p.get("properties", {})))


def _branches(schema: dict[str, Any], top: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema with references resolved and unions expanded."""
    if "$ref" in schema:
        yield from _branches(top["$defs"][schema["$ref"].rsplit("/", 1)[-1]], top)
        return
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if not options:
        yield schema
    for option in options:
        yield from _branches(option, top)
