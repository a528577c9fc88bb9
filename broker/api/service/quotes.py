"""Use cases before a purchase: check a spec, price every offer for it, and predict the effect of policies."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

from broker.api.core.auth import Caller, Forbidden
from broker.api.schemas.quotes import WhatIfRequest, WhatIfView
from broker.api.service.interfaces import Checked, MarketReader, Preflight, Settings
from broker.api.service.job_data import check_time
from broker.api.service.policies import Policies
from broker.api.service.spec_inputs import Inputs, batched
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId, JobIds
from broker.domain.job import Handle, Job
from broker.domain.money import ZERO, format_usd
from broker.domain.offer import Offer, Quote
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.lifecycle.checkpoint_compat import incompatibility
from broker.lifecycle.retention import last_checkpoint, origin_deleted_message
from broker.policy.budgets import Refusal
from broker.policy.host_access import HostAccess, HostUser, admit_all
from broker.ports import Blobs, Clock, Store, Upload
from broker.ports.blobs import MAX_LISTED
from broker.quote.engine import quote
from broker.quote.servability import ServableMarket, may_be_served, unserved
from broker.quote.spot.plan import PlanSource, no_plan
from broker.runtime.cpu_threads import CpuThreads
from broker.runtime.spot_planner import InlinePlans, PlanRounds
from trainer.contract import object_keys

RECENTLY_UNAVAILABLE = "sold out, refused or failed lately: not tried for a while"
REMEMBERED_OUTLOOKS = 1000
"""Maximum number of outlooks that are cached until the market changes."""


@dataclass(frozen=True, kw_only=True)
class MarketOutlook:
    """Judgement of the market on a job, regardless of its cap."""

    cheapest_usd: Decimal | None
    """Minimum expected dollars to finish; None: not known, or no offer fits now."""
    unserved: Problem | None
    """Set if no provider can ever serve the job."""


class QuoteService:
    """Checks and prices specs. It reads the market from memory and never asks a cloud."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        market: MarketReader,
        preflight: Preflight,
        clock: Clock,
        settings: Settings,
        *,
        entropy: Callable[[int], bytes],
        learned: LearnedCorrections = lambda: NO_CORRECTIONS,
        host_access: HostAccess = admit_all,
        plans: PlanRounds | None = None,
    ) -> None:
        """`entropy(n)` returns n random bytes. `learned` returns the corrections learned from own runs.

        `host_access` returns whether the jobs of a user may run on the daemon's host. `plans`: source of spot plans;
        None: they are built where they are needed.
        """
        self.market = market
        self.preflight = preflight
        self.learned = learned
        self.host_access = host_access
        self._plans = plans or InlinePlans()
        self.inputs = Inputs()
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._job_ids = JobIds(entropy)
        self.settings = settings
        self.threads = CpuThreads()
        self.policies = Policies(store, clock, self.threads)
        self._outlooks: dict[object, MarketOutlook] = {}
        self._outlooks_at: Sequence[Offer] = ()

    async def quote(self, caller: Caller, spec: JobSpec) -> tuple[Checked, Quote, Refusal | None]:
        """Return (the checks' result, every offer ranked, the effect of policies now). Raises InvalidInput, Busy."""
        spec, _, checked = await self.check(caller, spec)
        excluded = await self._store.blocked_offers()
        if not caller.admin:  # the reasons may describe launches of another team
            excluded = dict.fromkeys(excluded, RECENTLY_UNAVAILABLE)
        if refusal := await self._host_refusal(caller.team, caller.owner):
            on_host = [offer.id for offer in self.market.offers() if self._runs_on_host(offer)]
            excluded = {**excluded, **dict.fromkeys(on_host, refusal)}
        plans = self._plans.begin()
        rank = partial(self._rank, caller.team, spec, checked, excluded, plans)
        ranking = await plans.settle(rank)
        if not may_be_served(ranking) and (problem := await self._unserved(caller.team, spec, checked)):
            raise InvalidInput(problem)
        job = self.new_job(caller.team, caller.owner, spec, checked.workload)
        if "cap_usd" not in spec.model_fields_set:
            job = replace(job, cap_usd=ranking.proposed_cap_usd or ZERO)
        foreseen = await self.policies.foresee(job, ranking, self.market.caps(), self.settings.drain_budget)
        return checked, ranking, foreseen

    async def what_if(self, caller: Caller, request: WhatIfRequest) -> WhatIfView:
        """Estimate memory and scaling in a thread. Raises InvalidInput, Busy."""
        return await self.threads.of_team(caller.team)(partial(self.preflight.what_if, request))

    async def check(self, caller: Caller, spec: JobSpec) -> tuple[JobSpec, Upload, Checked]:
        """Return the spec with its data format and batch resolved, its upload, and the checks' report.

        Raises Busy, and InvalidInput with every fault.
        """
        rows = self._store.as_tenant(caller.tenant)
        faults = [
            *self.inputs.providers(spec, self.market.caps()),
            *self.inputs.accelerators(spec, self.market.offers()),
            *await self.inputs.secrets(rows, caller.owner, spec),
            *await self.host_faults(caller.team, caller.owner, spec),
        ]
        if spec.origin is not None:
            faults += await self._origin_faults(caller, spec.origin, spec)
        try:
            typed, upload = await self.inputs.upload(rows, caller.tenant, spec)
            resolved, batch_message = batched(self.preflight.permit(typed), upload)
            checked = await self.preflight.check(resolved, upload.summary, self.threads.of_team(caller.team))
        except InvalidInput as error:
            raise InvalidInput(*faults, *error.problems) from None
        if faults:
            raise InvalidInput(*faults)
        check_time(resolved, self._clock.now(), self.settings.drain_budget.lead_s)
        if batch_message:
            checked = replace(checked, report={**checked.report, "settled": batch_message})
        return resolved, upload, checked

    async def host_faults(self, team: str, owner: str, spec: JobSpec) -> list[Problem]:
        """Return a fault if the spec names only providers of the daemon's host, and the owner may not use it."""
        caps = self.market.caps()
        providers = [name for name in spec.resources.providers or caps if name in caps]
        if not providers or not all(caps[name].runs_on_host for name in providers):
            return []
        refusal = await self._host_refusal(team, owner)
        return [Problem(field="resources.providers", message=refusal)] if refusal else []

    async def check_host_shell(self, caller: Caller, handle: Handle) -> None:
        """Raise Forbidden if the machine is the daemon's host and the caller may not run code there."""
        caps = self.market.caps().get(handle.provider)
        if caps is None or not caps.runs_on_host or caller.admin:
            return
        if refusal := await self._host_refusal(caller.team, caller.owner):
            raise Forbidden(refusal)

    async def _host_refusal(self, team: str, owner: str) -> str:
        return (await self.host_access(HostUser(team=team, owner=owner))).refusal

    def _runs_on_host(self, offer: Offer) -> bool:
        caps = self.market.caps().get(offer.provider)
        return caps is not None and caps.runs_on_host

    async def _origin_faults(self, caller: Caller, origin: JobId, spec: JobSpec) -> list[Problem]:
        job = await self._store.as_tenant(caller.tenant).job(origin)
        if job is None:
            return [Problem(field="init_from", message=f"no job {origin}; `gpubroker ls` lists yours")]
        if (when := job.deleted.get(last_checkpoint(job))) is not None:
            return [Problem(field="init_from", message=f"{origin_deleted_message(origin, when)}; leave it out")]
        if not await self.has_checkpoint(job):
            return [Problem(field="init_from", message=f"job {origin} has no committed checkpoint; leave it out")]
        with contextlib.suppress(InvalidInput):  # `check` reports this error with the other faults
            spec = self.preflight.permit(spec)  # the stored spec was changed in the same way
        if (fault := incompatibility(job.spec, spec)) is not None:
            return [Problem(field=fault[0], message=fault[1])]
        return []

    async def has_checkpoint(self, job: Job) -> bool:
        """Return True if the job has a committed checkpoint that was not deleted."""
        if last_checkpoint(job) in job.deleted:
            return False
        objects = await self._blobs.list(object_keys.checkpoints(job.id), max_objects=MAX_LISTED)
        return any(object_keys.is_manifest(info.key) for info in objects)

    async def check_offers(self, team: str, spec: JobSpec, checked: Checked) -> None:
        """Raise InvalidInput if no provider can ever serve the job, or all offers cost more than the cap. Raises Busy.

        A job that waits for ever would hide that its spec is wrong.
        """
        outlook = await self._outlook(team, spec, checked)
        if outlook.unserved is not None:
            raise InvalidInput(outlook.unserved)
        cheapest = outlook.cheapest_usd
        if cheapest is not None and cheapest > spec.cap_usd:
            message = (
                f"{format_usd(spec.cap_usd)} is too small: the cheapest offer is expected to cost "
                f"{format_usd(cheapest)} (P50); raise the cap to at least that"
            )
            raise InvalidInput(Problem(field="cap_usd", message=message))

    async def _outlook(self, team: str, spec: JobSpec, checked: Checked) -> MarketOutlook:
        """Return the outlook of a job. Cached until the market changes: many jobs are alike."""
        offers = self.market.offers()
        if offers is not self._outlooks_at or len(self._outlooks) > REMEMBERED_OUTLOOKS:
            self._outlooks, self._outlooks_at = {}, offers
        script = None if spec.script is None else (spec.script.checkpoints, spec.script.image is None)
        key = (checked.workload, checked.local_model, spec.resources, script, self.learned())
        if key in self._outlooks:
            return self._outlooks[key]
        ranking = await self._rank(team, spec, checked, {}, no_plan)
        problem = None if may_be_served(ranking) else await self._unserved(team, spec, checked)
        outlook = MarketOutlook(cheapest_usd=ranking.cheapest_usd, unserved=problem)
        if offers is self._outlooks_at:
            self._outlooks[key] = outlook
        return outlook

    async def _unserved(self, team: str, spec: JobSpec, checked: Checked) -> Problem | None:
        """Return why no provider can ever serve the job, although offers of the past and the future count."""
        market = ServableMarket(
            caps=self.market.caps(),
            status=self.market.status(),
            offers=self.market.offers(),
            now=self._clock.now(),
            local_files=self._blobs.local or checked.local_model,
            scoped_store=self._blobs.scopes,
            learned=self.learned(),
        )
        return await self.threads.of_team(team)(partial(unserved, spec, checked.workload, market))

    async def _rank(
        self, team: str, spec: JobSpec, checked: Checked, excluded: Mapping[str, str], plans: PlanSource
    ) -> Quote:
        rank = partial(
            quote,
            spec,
            checked.workload,
            self.market.offers(),
            now=self._clock.now(),
            local_files=self._blobs.local or checked.local_model,
            scoped_store=self._blobs.scopes,
            spent=ZERO,
            cap_left=spec.cap_usd,
            excluded=excluded,
            caps=self.market.caps(),
            lead_s=self.settings.drain_budget.lead_s,
            storage_usd_per_gib_month=self.settings.storage_usd_per_gib_month,
            learned=self.learned(),
            plans=plans,
        )
        return await self.threads.of_team(team)(rank)

    def new_job(self, team: str, owner: str, spec: JobSpec, workload: Workload, retry_of: JobId | None = None) -> Job:
        """Return a job with a new id, without storing the job."""
        return Job(
            id=self._job_ids.new(),
            team=team,
            owner=owner,
            spec=spec,
            workload=workload,
            created_at=self._clock.now(),
            cap_usd=spec.cap_usd,
            retry_of=retry_of,
        )
