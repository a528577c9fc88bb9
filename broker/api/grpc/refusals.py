"""Errors as gRPC statuses with google.rpc details: what a problem document is to HTTP."""

import re
from collections.abc import Mapping, Sequence

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from broker.api.auth import Forbidden, Unauthenticated
from broker.api.problems import Conflict, Corrupt, Deleted, NotFound, RateLimited, TooLarge, TooMany
from broker.domain.errors import (
    BlobsUnavailable,
    Gone,
    GpubrokerError,
    IdempotencyConflict,
    InUse,
    InvalidInput,
    OverBudget,
    Problem,
    Rejected,
    StoreUnavailable,
)

DOMAIN = "gpubroker"
DETAILS = "grpc-status-details-bin"
AGAIN_S = 2.0
TEXT_CHARACTERS = 1000
DETAIL_BYTES = 4096
"""Metadata of more than 8 KiB is refused by many clients; base64 and the text are to fit as well."""

CODES: Mapping[type[GpubrokerError], grpc.StatusCode] = {
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    Deleted: grpc.StatusCode.NOT_FOUND,
    IdempotencyConflict: grpc.StatusCode.ALREADY_EXISTS,
    InUse: grpc.StatusCode.FAILED_PRECONDITION,
    OverBudget: grpc.StatusCode.FAILED_PRECONDITION,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Corrupt: grpc.StatusCode.DATA_LOSS,
    StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    BlobsUnavailable: grpc.StatusCode.UNAVAILABLE,
    Gone: grpc.StatusCode.FAILED_PRECONDITION,
    Rejected: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: GpubrokerError) -> grpc.StatusCode:
    """INTERNAL for one that has no status of its own."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def status_of(error: GpubrokerError) -> status_pb2.Status:
    """With ErrorInfo (the error's kind), BadRequest (each wrong field) and RetryInfo (when to ask again)."""
    code = code_of(error)
    text = _text(error)
    made = status_pb2.Status(code=code.value[0], message=text)
    made.details.add().Pack(error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN))
    if isinstance(error, InvalidInput):
        made.details.add().Pack(_bad_request(error.problems))
    again_s = error.after_s if isinstance(error, RateLimited) else AGAIN_S
    if code is grpc.StatusCode.UNAVAILABLE or isinstance(error, RateLimited):
        wait = duration_pb2.Duration()
        wait.FromNanoseconds(int(again_s * 1e9))
        made.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=wait))
    return made


def fault() -> status_pb2.Status:
    """Ours: the log says what happened, the answer does not."""
    made = status_pb2.Status(code=code_pb2.INTERNAL, message="a fault of the server; its log has the details")
    made.details.add().Pack(error_details_pb2.ErrorInfo(reason="FAULT", domain=DOMAIN))
    return made


def _text(error: GpubrokerError) -> str:
    if isinstance(error, InvalidInput) and len(error.problems) > 1:
        return f"{len(error.problems)} things are wrong; see the field violations"
    return _short(str(error))


def _bad_request(problems: Sequence[Problem]) -> error_details_pb2.BadRequest:
    """As many as fit; the text says how many there are."""
    made = error_details_pb2.BadRequest()
    for problem in problems:
        made.field_violations.add(field=_short(problem.field), description=_short(problem.message))
        if made.ByteSize() > DETAIL_BYTES:
            del made.field_violations[-1]
            break
    return made


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS else text[: TEXT_CHARACTERS - 1] + "…"


def _reason(error: GpubrokerError) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()
