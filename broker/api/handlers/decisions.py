"""Why attempts were bought."""

from typing import Annotated

from pydantic import Field

from broker.api.core.auth import Caller
from broker.api.core.problems import NotFound
from broker.api.http.context import SERVICE, JobRef
from broker.api.http.openapi import Api, Call
from broker.api.schemas.plans import ConsideredView, DecisionView
from broker.api.service.jobs import Service
from broker.domain.ids import JobId, attempt_id
from broker.quote.decision_record import unpacked

AttemptNumber = Annotated[int, Field(ge=1, le=100_000)]

api = Api()


@api.op("GET", "/v1/jobs/{job_id}/decisions/{number}", scope="read", errors=(404,))
async def get_decision(call: Call, job_id: JobRef, number: AttemptNumber) -> DecisionView:
    """Why an attempt was bought: every offer of its market, kept or dropped, as it was ranked."""
    return await decision(call.request.app[SERVICE], call.caller, job_id, number)


async def decision(service: Service, caller: Caller, job_id: JobId, number: int) -> DecisionView:
    """Raises NotFound."""
    job = await service.job(caller, job_id)
    document = await service.rows(caller).decision(attempt_id(job.id, number))
    if document is None:
        raise NotFound(f"job {job_id} has no attempt {number}")
    return DecisionView(items=tuple(ConsideredView.model_validate(one) for one in unpacked(document)))
