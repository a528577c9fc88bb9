"""Handlers: quotes, jobs, offers and providers."""

from broker.api.http.context import SERVICE
from broker.api.http.openapi import Api, Call
from broker.api.schemas.jobs import CapChange, JobDetail, JobPage, JobView, LedgerLine, LedgerList
from broker.api.schemas.offers import OfferHistoryView, OfferList, ProviderList
from broker.api.schemas.plans import DecisionView
from broker.api.schemas.queries import (
    AttemptNumber,
    DataQuery,
    JobRef,
    JobsQuery,
    OfferHistoryQuery,
    OffersQuery,
    QuoteQuery,
    RetryQuery,
)
from broker.api.schemas.quotes import QuoteSpec, QuoteView, WhatIfRequest, WhatIfView
from broker.api.service import offers, views
from broker.domain.job import Job
from broker.domain.spec import JobSpec
from broker.lifecycle.retention import KINDS

api = Api()


@api.op("POST", "/v1/quotes", scope="read")
async def quote(call: Call, query: QuoteQuery, body: QuoteSpec) -> QuoteView:
    """Check a spec and price every offer against it; nothing is created."""
    result = await call.request.app[SERVICE].quotes.quote(call.caller, body)
    return views.quote(*result, query.limit)


@api.op("POST", "/v1/what-if", scope="read")
async def what_if(call: Call, body: WhatIfRequest) -> WhatIfView:
    """Estimate the memory by category, speed and cost of a fine-tune for each number of GPUs, without a data set."""
    return await call.request.app[SERVICE].quotes.what_if(call.caller, body)


@api.op("POST", "/v1/jobs", scope="submit", status=202, errors=(409,), headers=("Idempotency-Key",))
async def submit_job(call: Call, body: JobSpec) -> JobView:
    """Submit a job; when this answers, it is durable.

    With an Idempotency-Key, a repetition of the same spec answers with the same job, and another spec with 409.
    """
    service = call.request.app[SERVICE]
    job, created = await service.submit(call.caller, body, key=_key(call))
    return _accepted(call, job, created)


@api.op("GET", "/v1/jobs", scope="read")
async def list_jobs(call: Call, query: JobsQuery) -> JobPage:
    """List jobs, newest first."""
    service = call.request.app[SERVICE]
    page = await service.jobs(call.caller, views.job_filter(query), query.cursor)
    latest = await service.latest_attempts(page.jobs)
    return JobPage(items=tuple(views.job(j, latest.get(j.id)) for j in page.jobs), next=page.next)


@api.op("GET", "/v1/jobs/{job_id}", scope="read", errors=(404,))
async def get_job(call: Call, job_id: JobRef) -> JobDetail:
    """Show a job with its attempts, live progress and money."""
    service = call.request.app[SERVICE]
    job = await service.job(call.caller, job_id)
    return views.job_detail(job, await service.attempts(call.caller, job), service.settings.storage_usd_per_gib_month)


@api.op("POST", "/v1/jobs/{job_id}/cancel", scope="submit", status=202, errors=(404, 409))
async def cancel_job(call: Call, job_id: JobRef) -> JobView:
    """Cancel a job: it saves a checkpoint and stops, and its machines are destroyed."""
    return views.job(await call.request.app[SERVICE].cancel(call.caller, job_id))


@api.op(
    "POST", "/v1/jobs/{job_id}/retry", scope="submit", status=202, errors=(404, 409, 410), headers=("Idempotency-Key",)
)
async def retry_job(call: Call, job_id: JobRef, query: RetryQuery) -> JobView:
    """Run an ended job again, as a new job linked to it."""
    resume = query.resume == "1"
    job, created = await call.request.app[SERVICE].retry(call.caller, job_id, resume=resume, key=_key(call))
    return _accepted(call, job, created)


@api.op("PATCH", "/v1/jobs/{job_id}", scope="submit", errors=(404, 409, 410))
async def raise_cap(call: Call, job_id: JobRef, body: CapChange) -> JobView:
    """Raise the cap; a capped job resumes."""
    return views.job(await call.request.app[SERVICE].raise_cap(call.caller, job_id, body.cap_usd))


@api.op("GET", "/v1/jobs/{job_id}/ledger", scope="read", errors=(404,))
async def get_ledger(call: Call, job_id: JobRef) -> LedgerList:
    """List every reservation, charge, release and adjustment of a job."""
    entries = await call.request.app[SERVICE].ledger(call.caller, job_id)
    return LedgerList(items=tuple(LedgerLine.model_validate(e) for e in entries))


@api.op("DELETE", "/v1/jobs/{job_id}/data", scope="submit", status=202, errors=(404, 409))
async def delete_data(call: Call, job_id: JobRef, query: DataQuery) -> JobDetail:
    """Delete stored data of an ended job. It is gone at once (410); its objects follow within minutes."""
    service = call.request.app[SERVICE]
    job = await service.stored_data.delete_data(call.caller, job_id, query.kind or KINDS)
    return views.job_detail(job, await service.attempts(call.caller, job), service.settings.storage_usd_per_gib_month)


@api.op("GET", "/v1/jobs/{job_id}/decisions/{number}", scope="read", errors=(404,))
async def get_decision(call: Call, job_id: JobRef, number: AttemptNumber) -> DecisionView:
    """Explain why an attempt was bought: every offer of its market, kept or dropped, as it was ranked."""
    return views.decision(await call.request.app[SERVICE].decision(call.caller, job_id, number))


@api.op("GET", "/v1/offers", scope="read")
async def list_offers(call: Call, query: OffersQuery) -> OfferList:
    """List current offers, cheapest first."""
    market = call.request.app[SERVICE].quotes.market
    return offers.for_sale(market, provider=query.provider, accelerators=query.accelerator, limit=query.limit)


@api.op("GET", "/v1/offers/history", scope="read")
async def offer_history(call: Call, query: OfferHistoryQuery) -> OfferHistoryView:
    """Show prices and availability of a GPU over time, the cheapest region first."""
    return await call.request.app[SERVICE].offer_history.history(call.caller, query)


@api.op("GET", "/v1/providers", scope="read")
async def list_providers(call: Call) -> ProviderList:
    """List every configured provider: its offers, and when it last answered."""
    return offers.providers(call.request.app[SERVICE].quotes.market, {})


@api.op("POST", "/v1/providers/check", scope="admin")
async def check_providers(call: Call) -> ProviderList:
    """Check each provider's credentials with one read-only request, and name what is missing."""
    service = call.request.app[SERVICE]
    return offers.providers(service.quotes.market, await service.check_providers())


def _key(call: Call) -> str | None:
    return call.request.headers.get("Idempotency-Key")


def _accepted(call: Call, job: Job, created: bool) -> JobView:
    call.headers["Location"] = f"/v1/jobs/{job.id}"
    if not created:
        call.headers["Idempotent-Replay"] = "true"
    return views.job(job)
