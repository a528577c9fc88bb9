"""The use cases, once, whatever the door. All are by team: what another team has does not exist for the caller."""

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from broker.api.core.auth import Caller
from broker.api.core.pagination import JobsPage, cursor_of, read_cursor
from broker.api.core.problems import Conflict, Deleted, NotFound
from broker.api.service.channels import ChannelService
from broker.api.service.interfaces import Checked, MarketReader, Preflight
from broker.api.service.job_data import JobDataService, check_data, check_time
from broker.api.service.policies import Policies
from broker.api.service.spec_inputs import Inputs, batched
from broker.api.service.spending import SpendingService
from broker.api.service.tenancy import Tenancy
from broker.billing.drain import DrainBudget
from broker.domain.errors import BlobError, BlobsUnavailable, InvalidInput, OriginDeleted, Problem, Rejected
from broker.domain.ids import JobId, job_id
from broker.domain.job import RESTING_JOB_STATES, TERMINAL_JOB_STATES, Attempt, Event, Handle, Job, JobState
from broker.domain.money import ZERO, LedgerEntry, show
from broker.domain.offer import Offer, Quote
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.lifecycle.checkpoint_compat import incompatibility
from broker.lifecycle.retention import last_checkpoint, origin_deleted
from broker.policy.budgets import Refusal
from broker.ports import Blobs, Clock, JobFilter, Notifier, Store, TenantStore, Upload
from broker.quote.engine import quote
from broker.runtime.secret_box import SecretBox
from trainer.contract import object_keys as keys

ID_ENTROPY = 9
RECENTLY_UNAVAILABLE = "sold out, refused or failed lately: left alone for a while"


NO_DRAIN_BUDGET = DrainBudget(detect_s=0.0, drain_s=0.0, teardown_proof_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes in bytes, times in seconds."""

    spool: Path
    """Folder of uploads under way; made when the first one comes."""
    blobs: Path | None = None
    """The blob store, where it is a folder."""
    upload_bytes: int = 256 * 1024**2
    poll_s: float = 2.0
    """Followers look again at least so often."""
    heartbeat_s: float = 15.0
    storage_usd_per_gib_month: Decimal = ZERO
    """What the blob store costs."""
    tempo: DrainBudget = NO_DRAIN_BUDGET
    """Of the controllers."""
    lease_stale_s: float = 90.0
    """/readyz: a broker's lease that did not change for so long is nobody's."""


Reach = Callable[[Handle, Sequence[str], bool], Awaitable[Sequence[str]]]
"""(machine, command, terminal or not) -> argv that runs it there. Raises ProviderError."""


async def nowhere(handle: Handle, command: Sequence[str], tty: bool) -> Sequence[str]:
    raise Rejected(f"{handle.provider} is not configured here, so there is no way to {handle.name}")


CheckProviders = Callable[[], Awaitable[Mapping[str, str | None]]]
"""What is wrong with each provider's credentials, in one line; None: nothing."""


async def _unasked() -> Mapping[str, str | None]:
    return {}


class Service:
    """Needs only ports; `app` wires it. `entropy(n)`: n random bytes."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: Blobs,
        market: MarketReader,
        preflight: Preflight,
        box: SecretBox,
        clock: Clock,
        entropy: Callable[[int], bytes],
        settings: Settings,
        reach: Reach = nowhere,
        check_providers: CheckProviders = _unasked,
        notifiers: Sequence[Notifier] = (),
        skew: Callable[[], float] = lambda: 0.0,
        learned: LearnedCorrections = lambda: NO_CORRECTIONS,
    ) -> None:
        """`skew`: seconds that this host's wall clock is ahead of `clock`. `learned`: what own runs have shown."""
        self.store = store
        self.blobs = blobs
        self.market = market
        self.preflight = preflight
        self.box = box
        self.clock = clock
        self.skew = skew
        self.learned = learned
        self.entropy = entropy
        self.settings = settings
        self.reach = reach
        self.check_providers = check_providers
        self.tenancy = Tenancy(store, clock, entropy)
        self.spending = SpendingService(store, clock)
        self.policies = Policies(store, clock)
        self.costs = JobDataService(store)
        self.channels = ChannelService(store, notifiers, box, clock, entropy)
        self._inputs = Inputs()
        self._cheapest_of: dict[object, Decimal | None] = {}
        self._cheapest_at: Sequence[Offer] = ()

    def rows(self, caller: Caller) -> TenantStore:
        """The store as the caller sees it."""
        return self.store.as_tenant(caller.tenant)

    # ----------------------------------------------------------------------------------------------- before the money

    async def quote(self, caller: Caller, spec: JobSpec) -> tuple[Checked, Quote, Refusal | None]:
        """Every offer against the spec, and what policies would do to the job now. Raises InvalidInput."""
        spec, _, checked = await self._check(caller, spec)
        check_time(spec, self.clock.now(), self.settings.tempo.lead_s)
        excluded = await self.store.blocked_offers()
        if not caller.admin:  # the words are about the launch of some team
            excluded = dict.fromkeys(excluded, RECENTLY_UNAVAILABLE)
        made, settings = self._quote(spec, checked, excluded, spec.cap_usd), self.settings
        job = self._job(caller.team, caller.owner, spec, checked.workload)
        if "cap_usd" not in spec.model_fields_set:
            job = replace(job, cap_usd=made.proposed_cap_usd or ZERO)
        return checked, made, await self.policies.foresee(job, made, self.market.caps(), settings.tempo)

    async def _check(self, caller: Caller, spec: JobSpec) -> tuple[JobSpec, Upload, Checked]:
        """The spec with its data format and its batch settled, its upload, and the findings. Raises InvalidInput."""
        faults = [
            *self._inputs.providers(spec, self.market.caps()),
            *self._inputs.accelerators(spec, self.market.offers()),
            *await self._inputs.secrets(self.rows(caller), caller.owner, spec),
        ]
        if spec.origin is not None:
            faults += await self._origin(caller, spec.origin, spec)
        try:
            found, upload = await self._inputs.upload(self.rows(caller), caller.tenant, spec)
            settled, told = batched(self.preflight.permit(found), upload)
            checked = await self.preflight.check(settled, upload.summary)
        except InvalidInput as error:
            raise InvalidInput(*faults, *error.problems) from None
        if faults:
            raise InvalidInput(*faults)
        return settled, upload, replace(checked, report={**checked.report, "settled": told}) if told else checked

    async def _origin(self, caller: Caller, origin: JobId, spec: JobSpec) -> list[Problem]:
        job = await self.rows(caller).job(origin)
        if job is None:
            return [Problem(field="init_from", message=f"no job {origin}; `gpubroker ls` lists yours")]
        if (when := job.deleted.get(last_checkpoint(job))) is not None:
            return [Problem(field="init_from", message=f"{origin_deleted(origin, when)}; leave it out")]
        if not await self._committed(job):
            return [Problem(field="init_from", message=f"job {origin} has no committed checkpoint; leave it out")]
        with contextlib.suppress(InvalidInput):  # which is told with the other faults
            spec = self.preflight.permit(spec)  # as the job's own spec was stored
        if (wrong := incompatibility(job.spec, spec)) is not None:
            return [Problem(field=wrong[0], message=wrong[1])]
        return []

    async def _committed(self, job: Job) -> bool:
        if last_checkpoint(job) in job.deleted:
            return False
        found = await self.blobs.list(keys.checkpoints(job.id))
        return any(keys.is_manifest(info.key) for info in found)

    def _quote(self, spec: JobSpec, checked: Checked, excluded: Mapping[str, str], cap: Decimal) -> Quote:
        return quote(
            spec,
            checked.workload,
            self.market.offers(),
            now=self.clock.now(),
            local_files=self.blobs.local or checked.local_model,
            scoped_store=self.blobs.scopes,
            spent=ZERO,
            cap_left=cap,
            excluded=excluded,
            caps=self.market.caps(),
            lead_s=self.settings.tempo.lead_s,
            storage_usd_per_gib_month=self.settings.storage_usd_per_gib_month,
            learned=self.learned(),
        )

    def _cheapest(self, spec: JobSpec, checked: Checked) -> Decimal | None:
        """Least expected dollars to finish; remembered until the market changes, since many jobs are alike."""
        offers = self.market.offers()
        if offers != self._cheapest_at or len(self._cheapest_of) > 1000:
            self._cheapest_of, self._cheapest_at = {}, offers
        key = (checked.workload, checked.local_model, spec.resources, self.learned())
        if key not in self._cheapest_of:
            self._cheapest_of[key] = self._quote(spec, checked, {}, spec.cap_usd).cheapest_usd
        return self._cheapest_of[key]

    # ------------------------------------------------------------------------------------------------------ submitting

    async def submit(self, caller: Caller, spec: JobSpec, *, key: str | None) -> tuple[Job, bool]:
        """(the durable job, True), or the job that this key made before and False.

        Raises InvalidInput, IdempotencyConflict; then nothing was created.
        """
        asked = json.dumps(spec.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        spec, upload, checked = await self._check(caller, spec)
        check_time(spec, self.clock.now(), self.settings.tempo.lead_s)
        cheapest = self._cheapest(spec, checked)
        if cheapest is not None and cheapest > spec.cap_usd:
            raise InvalidInput(
                Problem(
                    field="cap_usd",
                    message=f"{show(spec.cap_usd)} is too small: the cheapest offer is expected to cost "
                    f"{show(cheapest)} (P50); raise the cap to at least that",
                )
            )
        job = self._job(caller.team, caller.owner, spec, checked.workload)
        told = checked.report.get("settled", "")
        try:
            source = keys.upload(upload.sha256)
            return await self._create(caller, job, source, upload.sha256, key=key, body=asked, told=told)
        except OriginDeleted as error:  # since it was looked at
            raise InvalidInput(Problem(field="init_from", message=f"{error}; leave it out")) from None

    def _job(self, team: str, owner: str, spec: JobSpec, work: Workload, retry_of: JobId | None = None) -> Job:
        return Job(
            id=job_id(self.entropy(ID_ENTROPY)),
            team=team,
            owner=owner,
            spec=spec,
            workload=work,
            created_at=self.clock.now(),
            cap_usd=spec.cap_usd,
            retry_of=retry_of,
        )

    async def _create(
        self, caller: Caller, job: Job, source: str, sha256: str, *, key: str | None, body: str, told: str = ""
    ) -> tuple[Job, bool]:
        """The data first, then the row: an orphan blob harms nobody, a job without its data does."""
        target = keys.job_data(job.id, sha256)
        try:
            await self.blobs.copy(source, target)
        except BlobsUnavailable:
            raise
        except BlobError:
            message = "its content was deleted, since nobody had sent it for long; upload it again"
            raise InvalidInput(Problem(field="upload", message=message)) from None
        message = "; ".join(filter(None, [f"{job.spec.name} submitted, cap {show(job.cap_usd)}", told]))
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
        """A new job linked to one at rest; with `resume` it continues from the old one's last checkpoint, if any."""
        origin = await self.job(caller, origin_id)
        if origin.state not in RESTING_JOB_STATES:
            raise Conflict(f"job {origin_id} is {origin.state}; cancel it first, or wait for its end")
        check_data(origin)
        spec = self.preflight.permit(origin.spec).model_copy(update={"cap_usd": origin.cap_usd})
        if spec.deadline is not None and spec.deadline <= self.clock.now():
            spec = spec.model_copy(update={"deadline": None})
        resumed = spec.model_copy(update={"init_from": f"job/{origin_id}"})
        if resume and origin.state is not JobState.SUCCEEDED and await self._committed(origin):
            with contextlib.suppress(OriginDeleted):  # since it was looked at: it begins anew
                return await self._again(caller, origin, resumed, resume=resume, key=key)
        try:
            return await self._again(caller, origin, spec, resume=resume, key=key)
        except OriginDeleted as error:
            raise Deleted(f"{error}; submit its spec anew without init_from") from None

    async def _again(
        self, caller: Caller, origin: Job, spec: JobSpec, *, resume: bool, key: str | None
    ) -> tuple[Job, bool]:
        job = self._job(origin.team, origin.owner, spec, origin.workload, origin.id)
        sha256 = self._inputs.reference(spec)
        body = f"retry {origin.id} {resume}"
        return await self._create(caller, job, keys.job_data(origin.id, sha256), sha256, key=key, body=body)

    # --------------------------------------------------------------------------------------------------------- reading

    async def job(self, caller: Caller, wanted: JobId) -> Job:
        """Raises NotFound."""
        job = await self.rows(caller).job(wanted)
        if job is None:
            raise NotFound(f"no job {wanted}; `gpubroker ls` lists yours")
        return job

    async def jobs(self, caller: Caller, where: JobFilter, cursor: str | None) -> JobsPage:
        """Newest first."""
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

    async def ledger(self, caller: Caller, wanted: JobId) -> Sequence[LedgerEntry]:
        job = await self.job(caller, wanted)
        return await self.rows(caller).ledger(job.id)

    # ------------------------------------------------------------------------------------------------------ intervening

    async def cancel(self, caller: Caller, wanted: JobId) -> Job:
        """Asks for the end; a second time changes nothing. Raises Conflict when the job ended otherwise."""
        job = await self.job(caller, wanted)
        if job.stop_requested or job.state is JobState.CANCELLED:
            return job
        if job.state in RESTING_JOB_STATES:
            raise Conflict(f"job {wanted} is {job.state} already; there is nothing to cancel")
        event = Event(job_id=job.id, kind="job.stop_requested", message=f"stop requested by {caller.owner}")
        return await self.rows(caller).request_stop(job.id, event) or job

    async def raise_cap(self, caller: Caller, wanted: JobId, cap_usd: Decimal) -> Job:
        """The same again changes nothing: who had no answer asks again. Raises Conflict for a job that ended,
        InvalidInput for a cap that is lower, or where only a higher one lets the job go on.
        """
        job = await self.job(caller, wanted)
        if job.state in TERMINAL_JOB_STATES:
            raise Conflict(f"job {wanted} is {job.state}; retry it with a higher cap instead")
        if job.state is JobState.CAPPED:
            check_data(job)
        if cap_usd == job.cap_usd and job.state is not JobState.CAPPED:
            return job
        if cap_usd <= job.cap_usd:
            raise InvalidInput(
                Problem(
                    field="cap_usd", message=f"{show(cap_usd)} is not above the cap of {show(job.cap_usd)}; raise it"
                )
            )
        event = Event(
            job_id=job.id,
            kind="job.cap_raised",
            message=f"cap raised from {show(job.cap_usd)} to {show(cap_usd)} by {caller.owner}",
        )
        raised = await self.rows(caller).raise_cap(job.id, cap_usd, event) or job
        if raised.cap_usd < cap_usd:
            check_data(raised)  # deleted since the job was read
        return raised
