"""Errors as RFC 9457 problem documents. Validation errors name the field and the fix."""

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from broker.api.schemas.base import FieldProblem, ProblemView
from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from trainer.contract.validation_messages import error_messages

MEDIA_TYPE = "application/problem+json"


class NotFound(GpubrokerError):
    """The resource does not exist or belongs to another team; callers cannot distinguish the two."""


class Conflict(GpubrokerError):
    """The current state does not allow the operation."""


class TooLarge(GpubrokerError):
    """The input has more bytes than the configuration allows."""


class StorageFull(GpubrokerError):
    """The daemon's disk is full; nothing was stored."""


class TooMany(GpubrokerError):
    """Too many operations are open at once, for the caller or for the daemon. Repeat the call after `after_s`."""

    def __init__(self, message: str, after_s: float = 5.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Overloaded(GpubrokerError):
    """The daemon is overloaded; nothing was done."""


class RateLimited(TooMany):
    """The token calls more often than allowed. The same call succeeds after `after_s`."""


class Deleted(GpubrokerError):
    """The resource was deleted; the message names the date."""


class Corrupt(GpubrokerError):
    """The bytes in the blob store differ from those that the manifest states."""


def drop_tracebacks(error: BaseException | None) -> None:
    """Remove the tracebacks of an answered error and of its causes.

    A traceback refers to the frame that raised the error, and the frame refers to the error. This cycle keeps the body
    of the request in memory until the oldest generation is garbage-collected.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def problem(
    status: int, detail: str, errors: Iterable[Problem] = (), headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a problem+json response. `title` is the status' standard phrase."""
    fields = tuple(FieldProblem(field=p.field, message=p.message) for p in errors)
    body = ProblemView(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=fields)
    return web.Response(
        status=status,
        body=body.model_dump_json(exclude=None if fields else {"errors"}).encode(),
        content_type=MEDIA_TYPE,
        headers=headers,
    )


def invalid_input_of(error: ValidationError, model: type[BaseModel], document: Any, root: str = "body") -> InvalidInput:
    """Return the faults of a validation.

    `document`: the input as plain objects; `root`: field name for faults of the whole input.
    """
    faults = error_messages(error, model, document)
    return InvalidInput(*(Problem(field=place or root, message=message) for place, message in faults.items()))


def of_json(error: ValidationError, model: type[BaseModel], raw: bytes) -> InvalidInput | None:
    """Return the faults of a JSON body, or None if `raw` is not JSON."""
    if error.error_count() == 1 and error.errors(include_url=False)[0]["type"] == "json_invalid":
        return None
    return invalid_input_of(error, model, json.loads(raw))
