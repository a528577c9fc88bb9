"""Handlers: what a job keeps."""

from typing import Annotated

from pydantic import Field

from broker.api.http.context import SERVICE, JobRef
from broker.api.http.openapi import Api, Call
from broker.api.schemas import core as models
from broker.api.schemas.job_data import StoredKindView
from broker.api.service import views
from broker.lifecycle.retention import KINDS
from trainer.contract.base import Config

api = Api()


class DataQuery(Config):
    kind: Annotated[tuple[StoredKindView, ...], Field(max_length=4)] = ()
    """Repeated: what to delete; none: everything."""


@api.op("DELETE", "/v1/jobs/{job_id}/data", scope="submit", status=202, errors=(404, 409))
async def delete_data(call: Call, job_id: JobRef, query: DataQuery) -> models.JobDetail:
    """Delete what a job at rest keeps: gone for everybody from now on (410); its objects follow within minutes."""
    service = call.request.app[SERVICE]
    job = await service.costs.delete_data(call.caller, job_id, query.kind or KINDS)
    return views.job_detail(job, await service.attempts(call.caller, job), service.settings.storage_usd_per_gib_month)
