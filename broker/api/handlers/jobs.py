"""Handlers: quotes and jobs."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from broker.api.http.context import SERVICE, JobRef
from broker.api.http.openapi import Api, Call
from broker.api.schemas import core as models
from broker.api.service import offers, views
from broker.domain.errors import InvalidInput, Problem
from broker.domain.job import Job, JobState
from broker.domain.spec import Accelerator, JobSpec, Moment, Name
from broker.ports import JobFilter
from trainer.contract.base import Config, Text, shaped

api = Api()
Label = Annotated[
    Text, shaped(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?:", "must be a label, as key:value", max_length=320)
]


def _iso(text: str) -> str:
    if not text[:5].strip("0123456789") == "-":
        raise ValueError(f"{text!r} is no ISO 8601 time; write it as 2026-01-31T12:00:00Z")
    return text


Instant = Annotated[Moment, BeforeValidator(_iso)]


class QuoteQuery(Config):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    """Lines in the answer; kept ones come first."""


class JobsQuery(Config):
    label: Annotated[tuple[Label, ...], Field(max_length=16)] = ()
    """`key:value`; repeated: all must match."""
    state: Annotated[tuple[JobState, ...], Field(max_length=16)] = ()
    """Repeated: any of them."""
    team: Name | None = None
    """For admins; all others see their own."""
    owner: Name | None = None
    """Who submitted it."""
    since: Instant | None = None
    """Created at or after."""
    until: Instant | None = None
    """Created before."""
    cursor: Annotated[str, Field(max_length=200)] | None = None
    """`next` of the page before."""
    limit: Annotated[int, Field(ge=1, le=500)] = 50


class RetryQuery(Config):
    resume: Literal["0", "1"] = "1"
    """1: continue from the old job's last checkpoint, if there is one and the job did not succeed."""


class OffersQuery(Config):
    provider: Name | None = None
    accelerator: Annotated[tuple[Accelerator, ...], Field(max_length=32)] = ()
    """Repeated: any of them; `a100` names all its variants."""
    limit: Annotated[int, Field(ge=1, le=5000)] = 500


@api.op("POST", "/v1/quotes", scope="read")
async def quote(call: Call, query: QuoteQuery, body: models.QuoteSpec) -> models.QuoteView:
    """Check a spec and price every offer against it; nothing is created."""
    found = await call.request.app[SERVICE].quote(call.caller, body)
    return views.quote(*found, query.limit)


@api.op("POST", "/v1/jobs", scope="submit", status=202, errors=(409,), headers=("Idempotency-Key",))
async def submit_job(call: Call, body: JobSpec) -> models.JobView:
    """Submit a job; when this answers, it is durable.

    With an Idempotency-Key, a repetition of the same spec answers with the same job, and another spec with 409.
    """
    service = call.request.app[SERVICE]
    job, created = await service.submit(call.caller, body, key=_key(call))
    return _accepted(call, job, created)


@api.op("GET", "/v1/jobs", scope="read")
async def list_jobs(call: Call, query: JobsQuery) -> models.JobPage:
    """List jobs, newest first."""
    page = await call.request.app[SERVICE].jobs(call.caller, job_filter(query), query.cursor)
    return models.JobPage(items=tuple(views.job(j) for j in page.jobs), next=page.next)


@api.op("GET", "/v1/jobs/{job_id}", scope="read", errors=(404,))
async def get_job(call: Call, job_id: JobRef) -> models.JobDetail:
    """A job with its attempts, live progress and money."""
    service = call.request.app[SERVICE]
    job = await service.job(call.caller, job_id)
    return views.job_detail(job, await service.attempts(call.caller, job), service.settings.storage_usd_per_gib_month)


@api.op("POST", "/v1/jobs/{job_id}/cancel", scope="submit", status=202, errors=(404, 409))
async def cancel_job(call: Call, job_id: JobRef) -> models.JobView:
    """Ask for the end of a job: it drains to a checkpoint, and its machines are destroyed."""
    return views.job(await call.request.app[SERVICE].cancel(call.caller, job_id))


@api.op(
    "POST", "/v1/jobs/{job_id}/retry", scope="submit", status=202, errors=(404, 409, 410), headers=("Idempotency-Key",)
)
async def retry_job(call: Call, job_id: JobRef, query: RetryQuery) -> models.JobView:
    """Run a job that is at rest again, as a new job linked to it."""
    resume = query.resume == "1"
    job, created = await call.request.app[SERVICE].retry(call.caller, job_id, resume=resume, key=_key(call))
    return _accepted(call, job, created)


@api.op("PATCH", "/v1/jobs/{job_id}", scope="submit", errors=(404, 409, 410))
async def raise_cap(call: Call, job_id: JobRef, body: models.CapChange) -> models.JobView:
    """Raise the cap; a capped job goes on."""
    return views.job(await call.request.app[SERVICE].raise_cap(call.caller, job_id, body.cap_usd))


@api.op("GET", "/v1/jobs/{job_id}/ledger", scope="read", errors=(404,))
async def get_ledger(call: Call, job_id: JobRef) -> models.LedgerList:
    """Every reservation, charge, release and adjustment of a job."""
    entries = await call.request.app[SERVICE].ledger(call.caller, job_id)
    return models.LedgerList(items=tuple(models.LedgerLine.model_validate(e) for e in entries))


@api.op("GET", "/v1/offers", scope="read")
async def list_offers(call: Call, query: OffersQuery) -> models.OfferList:
    """What is for sale now, cheapest first."""
    market = call.request.app[SERVICE].market
    return offers.for_sale(market, provider=query.provider, accelerators=query.accelerator, limit=query.limit)


@api.op("GET", "/v1/providers", scope="read")
async def list_providers(call: Call) -> models.ProviderList:
    """Every configured provider: what it sells, and when it last answered."""
    return offers.providers(call.request.app[SERVICE].market, {})


@api.op("POST", "/v1/providers/check", scope="admin")
async def check_providers(call: Call) -> models.ProviderList:
    """Ask each provider one read-only question: do its credentials work, and if not, what is missing?"""
    service = call.request.app[SERVICE]
    return offers.providers(service.market, await service.check_providers())


def _key(call: Call) -> str | None:
    return call.request.headers.get("Idempotency-Key")


def _accepted(call: Call, job: Job, created: bool) -> models.JobView:
    call.headers["Location"] = f"/v1/jobs/{job.id}"
    if not created:
        call.headers["Idempotent-Replay"] = "true"
    return views.job(job)


def job_filter(query: JobsQuery) -> JobFilter:
    """Raises InvalidInput for a label that is asked for with two values."""
    return JobFilter(
        team=query.team,
        owner=query.owner,
        states=query.state,
        labels=_labels(query.label),
        since=query.since,
        until=query.until,
        limit=query.limit,
    )


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in given:
        key, _, value = text.partition(":")
        if labels.setdefault(key, value) != value:
            raise InvalidInput(Problem(field="label", message=f"{key} is asked for with two values; keep one"))
    return labels
