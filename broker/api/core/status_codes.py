"""Table of the HTTP status and gRPC code of each error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from broker.api.core.auth import Forbidden, Unauthenticated
from broker.api.core.problems import Conflict, Corrupt, Deleted, NotFound, Overloaded, StorageFull, TooLarge, TooMany
from broker.domain.errors import (
    BlobsUnavailable,
    Busy,
    Gone,
    GpubrokerError,
    IdempotencyConflict,
    InUse,
    InvalidInput,
    OverBudget,
    Rejected,
    StaleVersion,
    StoreUnavailable,
)

RETRY_AFTER_S = 2.0
"""Seconds after which a client may repeat a call that failed because of an outage."""


@dataclass(frozen=True)
class Answer:
    http: int
    grpc: Literal[
        "ALREADY_EXISTS", "DATA_LOSS", "FAILED_PRECONDITION", "INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND",
        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNAVAILABLE",
    ]  # fmt: skip
    """Name of a `grpc.StatusCode`."""


ANSWERS: Mapping[type[GpubrokerError], Answer] = {
    InvalidInput: Answer(422, "INVALID_ARGUMENT"),
    Unauthenticated: Answer(401, "UNAUTHENTICATED"),
    Forbidden: Answer(403, "PERMISSION_DENIED"),
    NotFound: Answer(404, "NOT_FOUND"),
    Deleted: Answer(410, "NOT_FOUND"),
    Conflict: Answer(409, "FAILED_PRECONDITION"),
    InUse: Answer(409, "FAILED_PRECONDITION"),
    StaleVersion: Answer(409, "FAILED_PRECONDITION"),
    OverBudget: Answer(409, "FAILED_PRECONDITION"),
    Gone: Answer(409, "FAILED_PRECONDITION"),
    Rejected: Answer(409, "FAILED_PRECONDITION"),
    IdempotencyConflict: Answer(409, "ALREADY_EXISTS"),
    TooLarge: Answer(413, "RESOURCE_EXHAUSTED"),
    StorageFull: Answer(507, "RESOURCE_EXHAUSTED"),
    TooMany: Answer(429, "RESOURCE_EXHAUSTED"),
    Corrupt: Answer(502, "DATA_LOSS"),
    Busy: Answer(503, "UNAVAILABLE"),
    Overloaded: Answer(503, "UNAVAILABLE"),
    StoreUnavailable: Answer(503, "UNAVAILABLE"),
    BlobsUnavailable: Answer(503, "UNAVAILABLE"),
}
FAULT = Answer(500, "INTERNAL")


def answer_to(error: GpubrokerError) -> Answer:
    """Return the status of an error; FAULT for an unlisted one."""
    return next((answer for kind, answer in ANSWERS.items() if isinstance(error, kind)), FAULT)


def public_text(error: GpubrokerError) -> str:
    """Return the text for callers. Texts of the database and the blob store name hosts, tables and settings."""
    if answer_to(error) is FAULT:
        return "an internal error; the server's log has the details"
    if isinstance(error, StoreUnavailable):
        return "the database gave no answer; the request may or may not have taken effect, read again"
    if isinstance(error, BlobsUnavailable):
        return "the blob store gave no answer; try again"
    return str(error)


def again_after_s(error: GpubrokerError) -> float | None:
    """Return the seconds after which the same call may succeed, or None if it never will."""
    if isinstance(error, TooMany):
        return error.after_s
    return RETRY_AFTER_S if answer_to(error).http == 503 else None
