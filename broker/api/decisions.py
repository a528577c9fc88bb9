"""Why attempts were bought."""

from typing import Annotated

from pydantic import Field

from broker.api.auth import Caller
from broker.api.context import SERVICE, JobRef
from broker.api.models_plans import ConsideredView, Decision
from broker.api.openapi import Api, Call
from broker.api.problems import NotFound
from broker.api.service import Service
from broker.decide.decision import unpacked
from broker.domain.ids import JobId, attempt_id

AttemptNumber = Annotated[int, Field(ge=1, le=100_000)]

api = Api()


@api.op("GET", "/v1/jobs/{job_id}/decisions/{number}", scope="read", errors=(404,))
async def get_decision(call: Call, job_id: JobRef, number: AttemptNumber) -> Decision:
    """Why an attempt was bought: every offer of its market, kept or dropped, as it was ranked."""
    return await decision(call.request.app[SERVICE], call.caller, job_id, number)


async def decision(service: Service, caller: Caller, job_id: JobId, number: int) -> Decision:
    """Raises NotFound."""
    job = await service.job(caller, job_id)
    document = await service.rows(caller).decision(attempt_id(job.id, number))
    if document is None:
        raise NotFound(f"job {job_id} has no attempt {number}")
    return Decision(items=tuple(ConsideredView.model_validate(one) for one in unpacked(document)))
