"""Use cases of jobs, shared by HTTP and gRPC. Every method is scoped to the caller's team.

Other teams' rows are invisible: the caller gets the same answer as for a job that does not exist.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from broker.api.core.auth import Caller
from broker.api.core.pagination import JobsPage, cursor_of, read_cursor
from broker.api.core.problems import Conflict, Deleted, NotFound
from broker.api.service.channels import ChannelService
from broker.api.service.interfaces import DaemonHooks, Settings
from broker.api.service.job_data import JobDataService, check_data
from broker.api.service.offers import OfferHistoryService
from broker.api.service.quotes import QuoteService
from broker.api.service.spending import SpendingService
from broker.api.service.tenancy import Tenancy
from broker.domain.errors import BlobError, BlobsUnavailable, InvalidInput, OriginDeleted, Problem
from broker.domain.ids import JobId, attempt_id
from broker.domain.job import (
    RESTING_JOB_STATES,
    TERMINAL_JOB_STATES,
    Attempt,
    Event,
    Job,
    JobState,
)
from broker.domain.money import LedgerEntry, format_usd
from broker.domain.offer import OfferSummary
from broker.domain.spec import JobSpec
from broker.ports import Blobs, Clock, JobFilter, Notifier, Store, TenantStore
from broker.quote.decision_record import unpacked
from broker.runtime.secret_box import SecretBox
from trainer.contract import object_keys


class Service:
    """Use cases of jobs, and the services of all other concerns. The daemon creates one for HTTP and gRPC."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: Blobs,
        quotes: QuoteService,
        box: SecretBox,
        clock: Clock,
        entropy: Callable[[int], bytes],
        settings: Settings,
        notifiers: Sequence[Notifier] = (),
        hooks: DaemonHooks | None = None,
    ) -> None:
        """`entropy(n)` returns n random bytes."""
        hooks = hooks or DaemonHooks()
        self.store = store
        self.blobs = blobs
        self.quotes = quotes
        self.box = box
        self.clock = clock
        self.entropy = entropy
        self.settings = settings
        self.skew, self.clock_step, self.claim_fault = hooks.skew, hooks.clock_step, hooks.claim_fault
        self.reach = hooks.reach
        self.check_providers = hooks.check_providers
        self.orphans = hooks.orphans
        self.tenancy = Tenancy(store, clock, entropy)
        self.spending = SpendingService(store, clock)
        self.policies = quotes.policies
        self.offer_history = OfferHistoryService(store, clock)
        self.stored_data = JobDataService(store)
        self.channels = ChannelService(store, notifiers, box, clock, entropy)

    def rows(self, caller: Caller) -> TenantStore:
        """Return the store restricted to the caller's team."""
        return self.store.as_tenant(caller.tenant)

    # ------------------------------------------------------------------------------------------------------ submitting

    async def submit(self, caller: Caller, spec: JobSpec, *, key: str | None) -> tuple[Job, bool]:
        """Return (the stored job, True), or (the job that this key created before, False).

        Raises InvalidInput, IdempotencyConflict; then nothing was created.
        """
        body = json.dumps(spec.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        spec, upload, checked = await self.quotes.check(caller, spec)
        await self.quotes.check_offers(caller.team, spec, checked)
        job = self.quotes.new_job(caller.team, caller.owner, spec, checked.workload)
        note = checked.report.get("settled", "")
        try:
            source = object_keys.upload(upload.sha256)
            return await self._create(caller, job, source, upload.sha256, key=key, body=body, note=note)
        except OriginDeleted as error:  # deleted after the check
            raise InvalidInput(Problem(field="init_from", message=f"{error}; leave it out")) from None

    async def _create(
        self, caller: Caller, job: Job, source: str, sha256: str, *, key: str | None, body: str, note: str = ""
    ) -> tuple[Job, bool]:
        """Copy the data, then write the row, because a job needs its data; a blob without a job is harmless."""
        target = object_keys.job_data(job.id, sha256)
        try:
            await self.blobs.copy(source, target)
        except BlobsUnavailable:
            raise
        except BlobError:
            message = "its content was deleted, because no user had sent it for a long time; upload it again"
            raise InvalidInput(Problem(field="upload", message=message)) from None
        message = "; ".join(filter(None, [f"{job.spec.name} submitted, cap {format_usd(job.cap_usd)}", note]))
        event = Event(job_id=job.id, kind="job.submitted", message=message)
        sha256 = hashlib.sha256(body.encode()).hexdigest()
        try:
            stored, created = await self.rows(caller).submit(job, key=key, body_sha256=sha256, events=(event,))
        except OriginDeleted:
            await self.blobs.delete(target)
            raise
        if not created:
            await self.blobs.delete(target)
        return stored, created

    async def retry(self, caller: Caller, origin_id: JobId, *, resume: bool, key: str | None) -> tuple[Job, bool]:
        """Create a job linked to one that has ended.

        With `resume`, the new job continues from the old job's last checkpoint, if there is one.
        """
        origin = await self.job(caller, origin_id)
        if origin.state not in RESTING_JOB_STATES:
            raise Conflict(f"job {origin_id} is {origin.state}; cancel it first, or wait for its end")
        check_data(origin)
        spec = self.quotes.preflight.permit(origin.spec).model_copy(update={"cap_usd": origin.cap_usd})
        if spec.deadline is not None and spec.deadline <= self.clock.now():
            spec = spec.model_copy(update={"deadline": None})
        resumed = spec.model_copy(update={"init_from": f"job/{origin_id}"})
        if resume and origin.state is not JobState.SUCCEEDED and await self.quotes.has_checkpoint(origin):
            with contextlib.suppress(OriginDeleted):  # deleted after the check: start from zero
                return await self._create_retry(caller, origin, resumed, resume=resume, key=key)
        try:
            return await self._create_retry(caller, origin, spec, resume=resume, key=key)
        except OriginDeleted as error:
            raise Deleted(f"{error}; submit its spec again without init_from") from None

    async def _create_retry(
        self, caller: Caller, origin: Job, spec: JobSpec, *, resume: bool, key: str | None
    ) -> tuple[Job, bool]:
        if faults := await self.quotes.host_faults(origin.team, origin.owner, spec):
            raise InvalidInput(*faults)
        job = self.quotes.new_job(origin.team, origin.owner, spec, origin.workload, origin.id)
        sha256 = self.quotes.inputs.reference(spec)
        body = f"retry {origin.id} {resume}"
        return await self._create(caller, job, object_keys.job_data(origin.id, sha256), sha256, key=key, body=body)

    # --------------------------------------------------------------------------------------------------------- reading

    async def job(self, caller: Caller, job_id: JobId) -> Job:
        """Return a job. Raises NotFound."""
        job = await self.rows(caller).job(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}; `gpubroker ls` lists yours")
        return job

    async def jobs(self, caller: Caller, where: JobFilter, cursor: str | None) -> JobsPage:
        """Return a page of jobs, newest first."""
        narrowed = JobFilter(
            team=where.team if caller.admin else caller.team,
            owner=where.owner,
            states=where.states,
            labels=where.labels,
            since=where.since,
            until=where.until,
            before=read_cursor(cursor) if cursor is not None else None,
            limit=where.limit,
        )
        jobs = await self.rows(caller).jobs(narrowed)
        full = len(jobs) == where.limit
        return JobsPage(jobs=jobs, next=cursor_of(jobs[-1]) if full else None)

    async def attempts(self, caller: Caller, job: Job) -> Sequence[Attempt]:
        return await self.rows(caller).attempts(job.id)

    async def latest_attempts(self, jobs: Sequence[Job]) -> Mapping[JobId, Attempt]:
        """Return the latest attempt of each job that has one, with one query. The jobs are the caller's own."""
        ids = [attempt_id(job.id, job.attempts) for job in jobs if job.attempts]
        return {a.job_id: a for a in (await self.store.attempts_by_id(ids)).values()} if ids else {}

    async def ledger(self, caller: Caller, job_id: JobId) -> Sequence[LedgerEntry]:
        job = await self.job(caller, job_id)
        return await self.rows(caller).ledger(job.id)

    async def decision(self, caller: Caller, job_id: JobId, number: int) -> Sequence[OfferSummary]:
        """Return every offer that was considered when an attempt was bought. Raises NotFound."""
        job = await self.job(caller, job_id)
        document = await self.rows(caller).decision(attempt_id(job.id, number))
        if document is None:
            raise NotFound(f"job {job_id} has no attempt {number}")
        return unpacked(document)

    # ------------------------------------------------------------------------------------------------------ intervening

    async def cancel(self, caller: Caller, job_id: JobId) -> Job:
        """Request the end of a job; a second request changes nothing. Raises Conflict for a job that has ended."""
        job = await self.job(caller, job_id)
        if job.stop_requested or job.state is JobState.CANCELLED:
            return job
        if job.state in RESTING_JOB_STATES:
            raise Conflict(f"job {job_id} is {job.state} already; there is nothing to cancel")
        event = Event(job_id=job.id, kind="job.stop_requested", message=f"stop requested by {caller.owner}")
        return await self.rows(caller).request_stop(job.id, event) or job

    async def raise_cap(self, caller: Caller, job_id: JobId, cap_usd: Decimal) -> Job:
        """Raise a job's cap. The same cap again changes nothing, so that a client may repeat a call without an answer.

        Raises Conflict for a job that has ended, and InvalidInput for a lower cap. A capped job needs a higher cap.
        """
        job = await self.job(caller, job_id)
        if job.state in TERMINAL_JOB_STATES:
            raise Conflict(f"job {job_id} is {job.state}; retry it with a higher cap instead")
        if job.state is JobState.CAPPED:
            check_data(job)
        if cap_usd == job.cap_usd and job.state is not JobState.CAPPED:
            return job
        if cap_usd <= job.cap_usd:
            raise InvalidInput(
                Problem(
                    field="cap_usd",
                    message=f"{format_usd(cap_usd)} is not above the cap of {format_usd(job.cap_usd)}; raise it",
                )
            )
        event = Event(
            job_id=job.id,
            kind="job.cap_raised",
            message=f"cap raised from {format_usd(job.cap_usd)} to {format_usd(cap_usd)} by {caller.owner}",
        )
        raised = await self.rows(caller).raise_cap(job.id, cap_usd, event) or job
        if raised.cap_usd < cap_usd:
            check_data(raised)  # deleted since the job was read
        return raised
