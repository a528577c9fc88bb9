"""Converts errors to gRPC statuses with google.rpc details, the counterpart of HTTP's problem documents."""

import logging
import re
from collections.abc import Sequence

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from broker.api.core.status_codes import again_after_s, answer_to, public_text
from broker.domain.errors import GpubrokerError, InvalidInput, Problem

DOMAIN = "gpubroker"
DETAILS = "grpc-status-details-bin"
log = logging.getLogger(__name__)
TEXT_CHARACTERS = 1000
DETAIL_BYTES = 4096
"""Maximum bytes of the details. Many clients refuse metadata above 8 KiB, which also has to hold text and base64."""


def status_of(error: GpubrokerError) -> status_pb2.Status:
    """Return the status with ErrorInfo (error class), BadRequest (invalid fields) and RetryInfo (delay)."""
    code = grpc.StatusCode[answer_to(error).grpc]
    status = status_pb2.Status(code=code.value[0], message=_text(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN))
    if isinstance(error, InvalidInput):
        status.details.add().Pack(_bad_request(error.problems))
    again_s = again_after_s(error)
    if again_s is not None:
        wait = duration_pb2.Duration()
        wait.FromNanoseconds(int(again_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=wait))
    return status


def internal_error() -> status_pb2.Status:
    """Return the status of an internal error. Only the log has the details."""
    status = status_pb2.Status(code=code_pb2.INTERNAL, message="an internal error; the server's log has the details")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="FAULT", domain=DOMAIN))
    return status


def _text(error: GpubrokerError) -> str:
    if isinstance(error, InvalidInput) and len(error.problems) > 1:
        return f"{len(error.problems)} fields are wrong; see the field violations"
    text = public_text(error)
    if text != str(error):
        log.warning("answered %s: %s", answer_to(error).grpc, error)
    return _short(text)


def _bad_request(problems: Sequence[Problem]) -> error_details_pb2.BadRequest:
    """Return as many field violations as fit into DETAIL_BYTES; the status message has their total number."""
    details = error_details_pb2.BadRequest()
    for problem in problems:
        details.field_violations.add(field=_short(problem.field), description=_short(problem.message))
        if details.ByteSize() > DETAIL_BYTES:
            del details.field_violations[-1]
            break
    return details


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS else text[: TEXT_CHARACTERS - 1] + "…"


def _reason(error: GpubrokerError) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()
