"""Validation of ids and idempotency keys in requests, by the rules of HTTP."""

import re
from typing import Any

from pydantic import TypeAdapter, ValidationError

from broker.api.schemas.queries import HEADERS, JobRef
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId
from trainer.contract.validation_messages import value_error_message

JOB_ID: TypeAdapter[JobId] = TypeAdapter(JobRef)
KEY = HEADERS["Idempotency-Key"]


def job_id(request: Any) -> JobId:
    """Return the request's job id. Raises InvalidInput."""
    try:
        return JOB_ID.validate_python(request.job_id)
    except ValidationError as error:
        raise InvalidInput(Problem(field="job_id", message=value_error_message(error))) from None


def idempotency_key(request: Any) -> str | None:
    """Return the request's idempotency key, or None. Raises InvalidInput."""
    if not request.HasField("idempotency_key"):
        return None
    key: str = request.idempotency_key
    if not (len(key) <= KEY["maxLength"] and re.fullmatch(KEY["pattern"], key)):
        message = f"must be at most {KEY['maxLength']} visible ASCII characters; correct it, or leave it out"
        raise InvalidInput(Problem(field="idempotency_key", message=message))
    return key
