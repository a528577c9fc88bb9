"""What requests say beside a body: ids, keys and positions, under the rules that HTTP has for them."""

import re
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from broker.api.handlers.decisions import AttemptNumber
from broker.api.handlers.feeds import MAX_SEQ
from broker.api.http.context import JobRef
from broker.api.http.openapi import HEADERS
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId
from trainer.contract.base import Config
from trainer.contract.validation_messages import alone

JOB_ID: TypeAdapter[JobId] = TypeAdapter(JobRef)
KEY = HEADERS["Idempotency-Key"]


class WatchQuery(Config):
    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    follow: bool = True


class FollowQuery(Config):
    attempt: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    position: Annotated[str, Field(max_length=4096)] = ""
    follow: bool = True


class DecisionQuery(Config):
    number: AttemptNumber


class GrpcRetryQuery(Config):
    resume: bool = True


def job_id(request: Any) -> JobId:
    """Raises InvalidInput."""
    try:
        return JOB_ID.validate_python(request.job_id)
    except ValidationError as error:
        raise InvalidInput(Problem(field="job_id", message=alone(error))) from None


def idempotency_key(request: Any) -> str | None:
    """Raises InvalidInput."""
    if not request.HasField("idempotency_key"):
        return None
    key: str = request.idempotency_key
    if not (len(key) <= KEY["maxLength"] and re.fullmatch(KEY["pattern"], key)):
        message = f"must be at most {KEY['maxLength']} visible ASCII characters; correct it, or leave it out"
        raise InvalidInput(Problem(field="idempotency_key", message=message))
    return key
