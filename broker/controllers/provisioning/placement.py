"""Placement: buys an offer for each queued job, or records why it waits or ends.

Steps: claim jobs, gather `PlacementFacts`, call `broker.quote.job_placement.decide_placement`, apply the decisions in
one write. Facts: the job, policies and their spending, blocked offers, the market, checkpoints, and attempts that a
restored backup lacks. The last three cost requests, so they are gathered only if the decision needs them.
Decisions: see `PlacementOutcome`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.market.host_offers import host_offers, refused_offers
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import JobId
from broker.domain.job import Job, JobState
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.lifecycle.recovery import furthest_first, lasting_manifests
from broker.policy.budgets import Applied
from broker.ports import Change
from broker.ports.blobs import MAX_LISTED
from broker.ports.policies import JobOwner
from broker.quote.job_placement import decide_placement, placement_events
from broker.quote.placement_facts import (
    FactsNeeded,
    MarketFacts,
    MissingFacts,
    PlacementDecision,
    PlacementFacts,
    PlacementSettings,
    QuoteCache,
)
from broker.runtime.spot_planner import PlanRound
from trainer.contract import object_keys

Troubles = Callable[[], Mapping[str, str]]
"""Returns why a provider lists no offers, by the provider's name."""
_STATES = (JobState.QUEUED, JobState.RECOVERING, JobState.AWAITING_APPROVAL)


@dataclass(frozen=True, kw_only=True)
class _PlacementRound:
    """Facts that all jobs of one claim share."""

    settings: PlacementSettings
    now: datetime
    """Time at which the store read `applied`."""
    applied: Mapping[JobOwner, Sequence[Applied]]
    """Policies that cover the jobs of an owner."""
    excluded: Mapping[JobOwner, Mapping[str, str]]
    """Reason by key of each excluded offer. It contains the offers of the daemon's host if the owner is refused there.
    """
    plans: PlanRound
    quotes: Mapping[JobOwner, QuoteCache]


class Placement:
    """Claims jobs that are queued or await approval, and recovering jobs whose back-off has ended."""

    name = "placement"

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        offers: Offers,
        troubles: Troubles = dict,
        learned: LearnedCorrections = lambda: NO_CORRECTIONS,
    ) -> None:
        self._context, self._inventory = context, inventory
        self._offers, self._troubles, self._learned = offers, troubles, learned
        self._restored, self._started = RestoredAttempts(context, inventory), False
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        context = self._context
        self._restored.begin()
        if not self._started:
            self._started = True
            await self._restored.start()
        with context.claim_watch.claiming(self.name):
            jobs = await context.store.claim_jobs(
                _STATES, owner=context.owner, lease_s=context.intervals.lease_s, limit=context.intervals.claim
            )
        if not jobs:
            await context.store.wait("jobs", self.every_s)
            return True  # no further pause is needed
        shared = await self._gather_round(jobs)
        decisions = await decide_batch(context, self.name, jobs, lambda job: self._decide(job, shared))
        await self._apply(decisions)
        return True

    async def _decide(self, job: Job, shared: _PlacementRound) -> PlacementDecision:
        facts = self._gather(job, shared)
        while isinstance(decision := await shared.plans.settle(partial(_placed, facts)), FactsNeeded):
            facts = await self._gather_more(decision, shared)
        return decision

    async def _apply(self, decisions: Sequence[tuple[Job, PlacementDecision]]) -> None:
        """Write all decisions. A job whose write was refused is released, to be decided again at once."""
        store = self._context.store
        are_written = await store.apply([_change(decision) for _, decision in decisions])
        # Another job used up the budget meanwhile, in this round or at another broker.
        refused = [job for (job, _), is_written in zip(decisions, are_written, strict=True) if not is_written]
        if refused:
            await store.release(refused, [], due_in_s=0.0)

    # -------------------------------------------------------------------------------------------------------- gather

    async def _gather_round(self, jobs: Sequence[Job]) -> _PlacementRound:
        context = self._context
        now, applied = await context.store.applied(list({(job.team, job.owner) for job in jobs}))
        excluded = {**await context.store.blocked_offers(), **self._inventory.refusals}
        on_host = host_offers(self._offers(), {name: provider.caps for name, provider in context.providers.items()})
        refused = {owner: await refused_offers(context.host_admission, owner, on_host) for owner in applied}
        return _PlacementRound(
            settings=context.placement_settings,
            now=now,
            applied=applied,
            excluded={owner: {**excluded, **offers} for owner, offers in refused.items()},
            plans=context.plans.begin(),
            quotes={owner: QuoteCache() for owner in applied},
        )

    def _gather(self, job: Job, shared: _PlacementRound) -> PlacementFacts:
        return PlacementFacts(
            job=job,
            now=self._context.clock.now(),
            settings=shared.settings,
            policies=shared.applied[job.team, job.owner],
            policies_at=shared.now,
            forbidden=self._context.forbidden(job.spec),
            excluded=shared.excluded[job.team, job.owner],
            troubles=self._troubles(),
        )

    async def _gather_more(self, needed: FactsNeeded, shared: _PlacementRound) -> PlacementFacts:
        """Return the facts with the missing ones added, or with the error of the blob store."""
        facts = needed.facts
        try:
            if needed.missing is MissingFacts.MARKET:
                facts = replace(facts, market=await self._market(facts.job, shared))
            else:
                manifests = facts.market.resume_from if facts.market else ()
                facts = replace(facts, restored=await self._restored.decide(facts.job, manifests))
        except BlobsUnavailable as e:
            facts = replace(facts, unreadable=str(e))
        return replace(facts, now=self._context.clock.now(), troubles=self._troubles())

    async def _market(self, job: Job, shared: _PlacementRound) -> MarketFacts:
        resume_from = await self._resume_from(job)
        return MarketFacts(
            offers=self._offers(),
            resume_from=resume_from,
            learned=self._learned(),
            plans=shared.plans,
            quotes=shared.quotes[job.team, job.owner],
        )

    async def _resume_from(self, job: Job) -> tuple[str, ...]:
        """Return the committed manifests of the job and of the job it starts from, the furthest step first."""
        manifests = await self._manifests(job.id) if job.attempts else ()
        if (origin := job.spec.origin) is not None:
            inherited = await self._manifests(origin)
            single_node = job.spec.resources.nodes == 1
            manifests += (
                inherited if single_node else lasting_manifests(inherited, await self._context.store.attempts(origin))
            )
        return manifests

    async def _manifests(self, job: JobId) -> tuple[str, ...]:
        listed = await self._context.blobs.list(object_keys.checkpoints(job), max_objects=MAX_LISTED)
        return furthest_first([blob.key for blob in listed])


async def _placed(facts: PlacementFacts) -> PlacementDecision | FactsNeeded:
    return decide_placement(facts)


def _change(decision: PlacementDecision) -> Change:
    return Change(
        job=(decision.before, decision.job),
        admit=decision.admit,
        decision=decision.record,
        ledger=decision.ledger,
        events=placement_events(decision),
        due_in_s=decision.due_in_s,
    )
