"""Errors as RFC 9457 problem documents, and validation errors in words that name the place and the fix."""

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from broker.api.schemas.base import FieldProblem, ProblemView
from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from trainer.contract.validation_messages import worded

MEDIA_TYPE = "application/problem+json"


class NotFound(GpubrokerError):
    """It does not exist, or is another team's: the two are not told apart."""


class Conflict(GpubrokerError):
    """The thing's state does not allow this now."""


class TooLarge(GpubrokerError):
    """More bytes than the configuration allows."""


class StorageFull(GpubrokerError):
    """The daemon's disk has no room for it; nothing of it was kept."""


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
    fields = tuple(FieldProblem(field=p.field, message=p.message) for p in errors)
    body = ProblemView(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=fields)
    return web.Response(
        status=status,
        body=body.model_dump_json(exclude=None if fields else {"errors"}).encode(),
        content_type=MEDIA_TYPE,
        headers=headers,
    )


def of_validation(error: ValidationError, model: type[BaseModel], given: Any, root: str = "body") -> InvalidInput:
    """`given`: the input as plain objects; `root` names an error of the whole."""
    found = worded(error, model, given)
    return InvalidInput(*(Problem(field=place or root, message=message) for place, message in found.items()))


def of_json(error: ValidationError, model: type[BaseModel], raw: bytes) -> InvalidInput | None:
    """None when `raw` is not JSON at all."""
    if any(e["type"] == "json_invalid" for e in error.errors(include_url=False, include_context=False)):
        return None
    return of_validation(error, model, json.loads(raw))
