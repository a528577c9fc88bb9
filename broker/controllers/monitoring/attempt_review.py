"""Review of attempts: asks an attempt on demand to drain when its job finishes for less on spot.

Steps: read live attempts every few minutes, and when a spot offer appears or becomes cheaper. Make one short list of
offers for each set of providers and regions. For each attempt, gather `ActiveReview` and call `review_active`. Write
moves as notes with the signal MOVE, so that interruption, termination and placement do the rest.
Facts: the market, blocked offers, policies, heartbeats; earlier attempts only of a job that would move.
Decisions: `Move` or `Stay`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal

from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.controllers.market.host_offers import host_offers, refused_offers
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.observation.inventory import Inventory
from broker.domain.ids import AttemptId
from broker.domain.job import Signal
from broker.domain.offer import Offer
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections, LearnedCorrections
from broker.policy.budgets import Applied
from broker.ports import Leased, Note
from broker.ports.policies import JobOwner
from broker.quote.job_placement import same_but_for_numbers
from broker.quote.placement_facts import PlacementSettings
from broker.quote.spot.review import ActiveReview, Move, Stay, may_move, review_active
from broker.quote.spot.shortlist import shortlist

CHEAPER = Decimal("0.95")
"""A spot offer is news if its price falls to this share of the price at the previous review."""

REST = 4.0
"""Pause after a round, as a multiple of the round's duration: a large market has news at each poll."""


@dataclass(frozen=True, kw_only=True)
class _ReviewRound:
    """Facts that all attempts of one round share."""

    settings: PlacementSettings
    offers: Sequence[Offer]
    excluded: Mapping[str, str]
    learned: Corrections
    now: datetime
    """Time at which the store read `applied`."""
    applied: Mapping[JobOwner, Sequence[Applied]]
    refused_on_host: Mapping[JobOwner, Mapping[str, str]]
    lists: dict[object, tuple[Offer, ...]] = field(default_factory=dict)
    """Short lists by owner, providers and regions."""


class AttemptReview:
    """Reads without a lease. A note is applied only if the attempt has no signal meanwhile."""

    name = "review"

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        offers: Offers,
        learned: LearnedCorrections = lambda: NO_CORRECTIONS,
    ) -> None:
        self._context, self._inventory = context, inventory
        self._offers, self._learned = offers, learned
        self._market: Sequence[Offer] = ()
        self._spot_usd: Mapping[str, Decimal] = {}
        self._due_s = self._rests_until_s = 0.0
        self._reasons: dict[AttemptId, str] = {}
        """Latest reason to stay of each attempt, so that an event reports a reason once."""
        self.decide: Callable[[ActiveReview], Move | Stay] = review_active
        self.every_s = context.intervals.billing_s

    async def step(self) -> bool:
        clock, began = self._context.clock, self._context.clock.monotonic()
        if began < self._rests_until_s:
            return False
        if self._is_market_news() or began >= self._due_s:
            self._due_s = began + self._context.intervals.review_s
            await self._review_all()
            ended = clock.monotonic()
            self._rests_until_s = ended + REST * (ended - began)
        return False

    def _is_market_news(self) -> bool:
        """Return True if a spot offer is on sale that was not, or that was clearly more expensive."""
        market, before = self._offers(), self._spot_usd
        if market is self._market:
            return False
        self._market = market
        self._spot_usd = {
            offer.id: offer.usd_per_hour for offer in market if offer.spot and offer.available is not False
        }
        return any(
            identity not in before or price <= before[identity] * CHEAPER for identity, price in self._spot_usd.items()
        )

    async def _review_all(self) -> None:
        store, providers = self._context.store, self._context.providers
        rows = [
            row
            for row in await store.live_attempts()
            if may_move(row.job, row.attempt) and row.attempt.line.offer.provider in providers
        ]
        self._reasons = {row.attempt.id: self._reasons.get(row.attempt.id, "") for row in rows}
        if not rows or not self._spot_usd:
            return
        shared, notes = await self._gather_round(rows), list[Note]()
        for row in rows:
            if (note := self._note(row, await self._decide(row, shared))) is not None:
                notes.append(note)
            await asyncio.sleep(0)  # thousands of reviews must not delay heartbeats and requests
        if notes:
            await store.note(notes)

    async def _decide(self, row: Leased, shared: _ReviewRound) -> Move | Stay:
        facts = self._gather(row, shared)
        decision = self.decide(facts)
        if isinstance(decision, Stay) or row.job.attempts <= 1:
            return decision
        earlier = await self._context.store.attempts(row.job.id)
        return self.decide(replace(facts, earlier=tuple(attempt for attempt in earlier if not attempt.live)))

    async def _gather_round(self, rows: Sequence[Leased]) -> _ReviewRound:
        context = self._context
        now, applied = await context.store.applied(sorted({(row.job.team, row.job.owner) for row in rows}))
        excluded = {**await context.store.blocked_offers(), **self._inventory.refusals}
        on_host = host_offers(self._market, {name: provider.caps for name, provider in context.providers.items()})
        return _ReviewRound(
            settings=context.placement_settings,
            offers=self._market,
            excluded=excluded,
            learned=self._learned(),
            now=now,
            applied=applied,
            refused_on_host={owner: await refused_offers(context.host_admission, owner, on_host) for owner in applied},
        )

    def _gather(self, row: Leased, shared: _ReviewRound) -> ActiveReview:
        job, owner = row.job, (row.job.team, row.job.owner)
        resources = job.spec.resources
        key = owner, tuple(resources.providers), tuple(resources.regions)
        if key not in shared.lists:
            excluded = {**shared.excluded, **shared.refused_on_host[owner]}
            shared.lists[key] = shortlist(shared.offers, shared.learned.spots, resources, excluded)
        return ActiveReview(
            job=job,
            attempt=row.attempt,
            now=self._context.clock.now(),
            settings=shared.settings,
            offers=shared.lists[key],
            learned=shared.learned,
            policies=shared.applied[owner],
            policies_at=shared.now,
            forbidden=self._context.forbidden(job.spec),
        )

    def _note(self, row: Leased, decision: Move | Stay) -> Note | None:
        """Return the note that starts a move, or that reports a new reason to stay; None: nothing is new."""
        job, attempt = row.job, row.attempt
        if isinstance(decision, Stay):
            is_known = same_but_for_numbers(decision.reason, self._reasons[attempt.id])
            if is_known or job.workload.shape is None:  # a script of unknown duration never moves
                return None
            self._reasons[attempt.id] = decision.reason
            report = event(job, "attempt.stays", f"attempt {attempt.number} {decision.reason}", attempt=attempt)
            return Note(attempt=attempt, job=job, forecast=job.forecast, idle=attempt.idle, events=(report,))
        message = f"attempt {attempt.number} {decision.message}"
        data = {"offer": decision.offer.id, "saved_usd": str(decision.saved_usd)}
        return Note(
            attempt=attempt,
            job=job,
            forecast=job.forecast,
            idle=attempt.idle,
            signal=Signal.MOVE,
            reason=decision.message,
            events=(event(job, "attempt.moves", message, attempt=attempt, data=data),),
        )
