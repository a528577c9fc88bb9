"""Errors as RFC 9457 problem documents, and validation errors in words that name the place and the fix."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from broker.api import models
from broker.domain.errors import GpubrokerError, InvalidInput, Problem

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 50
PLAIN = {"tuple": "list", "Tuple": "list", "valid dictionary": "mapping of keys to values"}
LENGTH = re.compile(r"^\w+ should have at (least|most) (\d+) (?:item|character)s?(?: after validation.*)?$")
NEVER_ECHOED = ("env", "secrets", "value", "blob_options", "database_url")
"""Top-level fields whose values may be confidential: they are not repeated in an error."""


class NotFound(GpubrokerError):
    """It does not exist, or is another team's: the two are not told apart."""


class Conflict(GpubrokerError):
    """The thing's state does not allow this now."""


class TooLarge(GpubrokerError):
    """More bytes than the configuration allows."""


class TooMany(GpubrokerError):
    """More at once than one caller, or the daemon, is allowed; ask again after `after_s`."""

    def __init__(self, message: str, after_s: float = 5.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Overloaded(GpubrokerError):
    """The daemon has more to answer than it can; nothing was done."""


class RateLimited(TooMany):
    """More in a time than one token is allowed; the same call is let through after `after_s`."""


class Deleted(GpubrokerError):
    """It was there, and was deleted: the message says when."""


class Corrupt(GpubrokerError):
    """The blob store holds other bytes than the manifest says."""


def problem(
    status: int, detail: str, errors: Iterable[Problem] = (), headers: Mapping[str, str] | None = None
) -> web.Response:
    """A problem+json response; `title` is the status' own phrase."""
    fields = tuple(models.FieldProblem(field=p.field, message=p.message) for p in errors)
    body = models.Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=fields)
    return web.Response(
        status=status,
        body=body.model_dump_json(exclude=None if fields else {"errors"}).encode(),
        content_type=MEDIA_TYPE,
        headers=headers,
    )


# --------------------------------------------------------------------------------------------- pydantic, in our words


def of_validation(error: ValidationError, model: type[BaseModel], given: Any, root: str = "body") -> InvalidInput:
    """`given`: the input as plain objects; `root` names an error of the whole."""
    merged: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        path = _path(detail, given)
        place = ".".join(map(str, path)) or root
        if place not in merged and len(merged) == MAX_ERRORS:
            continue  # words take time, and a body has room for hundreds of thousands of errors
        text = _message(detail, path, model)
        found = merged.setdefault(place, [])
        if text not in found:
            found.append(text)
    return InvalidInput(*(Problem(field=f, message=", or ".join(m)) for f, m in merged.items()))


def of_json(error: ValidationError, model: type[BaseModel], raw: bytes) -> InvalidInput | None:
    """None when `raw` is not JSON at all."""
    if any(e["type"] == "json_invalid" for e in error.errors(include_url=False, include_context=False)):
        return None
    return of_validation(error, model, json.loads(raw))


def _path(detail: ErrorDetails, given: Any) -> tuple[int | str, ...]:
    """Pydantic's location without the names of union branches, which are no part of the input."""
    path: list[int | str] = []
    here = given
    for i, part in enumerate(detail["loc"]):
        found = _step(here, part)
        if found is not None:
            here = found[0]
        elif not (detail["type"] == "missing" and i == len(detail["loc"]) - 1):
            continue
        path.append(part)
    return tuple(path)


def _step(here: Any, part: int | str) -> tuple[Any] | None:
    if isinstance(here, Mapping) and part in here:
        return (here[part],)
    if isinstance(here, list | tuple) and isinstance(part, int) and part < len(here):
        return (here[part],)
    return None


def _message(detail: ErrorDetails, path: tuple[int | str, ...], model: type[BaseModel]) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(str(path[-1]) if path else "", known_keys(model, path[:-1]))
        case "missing":
            return "is missing; add it"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
    text = detail["msg"].replace("Input should be", "must be").replace("Input should", "must")
    for python, plain in PLAIN.items():
        text = text.replace(python, plain)
    text = LENGTH.sub(partial(_length, "character" if isinstance(detail["input"], str) else "item"), text)
    text = text[:1].lower() + text[1:]
    value = detail["input"]
    if isinstance(value, str | int | float | bool) and not (path and path[0] in NEVER_ECHOED):
        shown = json.dumps(value)
        text += f", not {shown if len(shown) <= 60 else shown[:57] + '...'}"
    return text


def _length(unit: str, found: re.Match[str]) -> str:
    return f"must have at {found[1]} {found[2]} {unit}{'' if found[2] == '1' else 's'}"


def _unknown(key: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; remove it, or use one of {', '.join(known)}" if known else "unknown key; remove it"


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys that `model` allows at a path of its input."""
    top = _schema(model)
    places = list(_branches(top, top))
    for part in path:
        inner = [p.get("items") if isinstance(part, int) else p.get("properties", {}).get(part) for p in places]
        places = [b for step in inner if step is not None for b in _branches(step, top)]
    return tuple(dict.fromkeys(k for p in places for k in p.get("properties", {})))


def _branches(schema: dict[str, Any], top: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema with references resolved and unions opened."""
    if "$ref" in schema:
        yield from _branches(top["$defs"][schema["$ref"].rsplit("/", 1)[-1]], top)
        return
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if not options:
        yield schema
    for option in options:
        yield from _branches(option, top)
