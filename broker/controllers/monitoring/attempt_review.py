"""Review of attempts: asks an attempt to drain when its job finishes for less on spot, or on cheaper spot.

Steps: claim attempts that are due for a review, so that each is reviewed by one broker. Make one short list of offers
for each set of providers and regions. For each attempt, gather `ActiveReview` and call `review_active`. Write moves as
notes with the signal MOVE, so that interruption, termination and placement do the rest. When a spot offer appears or
becomes cheaper, each broker reviews the attempts again that it reviewed last.
Facts: the market, blocked offers, policies, heartbeats; earlier attempts only of a job that would move.
Decisions: `Move` or `Stay`, reported by `review_event`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from zlib import crc32

from broker.controllers.base.context import ControllerContext
from broker.controllers.market.host_offers import host_offers, refused_offers
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.monitoring.review_market import ReviewMarket, ReviewShortlists
from broker.controllers.observation.inventory import Inventory
from broker.domain.job import Signal
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections, LearnedCorrections
from broker.policy.budgets import Applied
from broker.ports import Leased, Note
from broker.ports.policies import JobOwner
from broker.quote.placement_facts import PlacementSettings
from broker.quote.spot.plan import PlanNotReady
from broker.quote.spot.review import ActiveReview, Move, Stay, may_move, review_active
from broker.quote.spot.review_report import review_event
from broker.runtime.spot_planner import PlanRound

log = logging.getLogger(__name__)

REST = 2.0
"""Pause after a claim, as a multiple of the time that its decisions took: a large market has news at each poll."""
DUE_REST = 0.5
"""The same multiple while more attempts are due by their rhythm than one claim takes. These must not be late."""
CLAIM = 50
"""Maximum number of attempts of one claim. Small claims spread the attempts evenly over the brokers."""
GOLDEN = 0.618034
"""Fraction of the golden ratio. Its multiples spread evenly, so that no broker always claims just before another."""


@dataclass(frozen=True, kw_only=True)
class _ReviewRound:
    """Facts that all attempts of one round share."""

    settings: PlacementSettings
    learned: Corrections
    now: datetime
    """Time at which the store read `applied`."""
    applied: Mapping[JobOwner, Sequence[Applied]]
    refused_on_host: Mapping[JobOwner, Mapping[str, str]]
    lists: ReviewShortlists
    plans: PlanRound


class AttemptReview:
    """Claims reviews without a lease. A note is applied only if the attempt has no signal meanwhile."""

    name = "review"

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        offers: Offers,
        learned: LearnedCorrections = lambda: NO_CORRECTIONS,
    ) -> None:
        self._context, self._inventory = context, inventory
        self._market, self._learned = ReviewMarket(offers), learned
        self._news_at: float | None = None
        """Monotonic time of market news after which attempts remain to be reviewed; None: there is none."""
        self._steps = crc32(context.owner.encode()) % 1000
        self.decide: Callable[[ActiveReview], Move | Stay] = review_active
        self.every_s = context.intervals.billing_s

    async def step(self) -> bool:
        began, self._steps = self._context.clock.monotonic(), self._steps + 1
        pause_s = self._context.intervals.billing_s * (1 + self._steps * GOLDEN % 1) / 2
        if self._market.is_news():
            self._news_at = began
        rows, rest = (await self._claim() if self._market.has_spot else []), DUE_REST
        due_count = len(rows)
        if due_count < CLAIM and self._news_at is not None:
            rest, reviewed = REST, {row.attempt.id for row in rows}
            news_s = self._context.clock.monotonic() - self._news_at
            newer = await self._claim(news_s, CLAIM - due_count) if self._market.has_spot else []
            rows += [row for row in newer if row.attempt.id not in reviewed]
            due_count += len(newer)
        if due_count < CLAIM:
            self._news_at = None
        else:
            pause_s = 0.0
        decided_s = await self._review([row for row in rows if may_move(row.job, row.attempt)])
        self.every_s = max(pause_s, rest * decided_s)
        return False

    async def _claim(self, own_older_s: float | None = None, limit: int = CLAIM) -> list[Leased]:
        """Claim attempts before their review is late (`review_s`).

        `own_older_s`: seconds since market news, after which attempts are due that this broker reviewed last.
        """
        intervals = self._context.intervals
        older_s = max(0.0, intervals.review_s - intervals.billing_s)
        rows = await self._context.store.claim_reviews(
            owner=self._context.owner,
            providers=list(self._context.providers),
            older_s=older_s,
            own_older_s=older_s if own_older_s is None else min(older_s, own_older_s),
            limit=limit,
        )
        return list(rows)

    async def _review(self, rows: Sequence[Leased]) -> float:
        """Review attempts and write what is new. Return the seconds that the decisions took."""
        if not rows:
            return 0.0
        shared, notes, decided_s = await self._gather_round(rows), list[Note](), 0.0
        for row in rows:
            began = self._context.clock.monotonic()
            try:
                if (note := _note(row, await self._decide(row, shared))) is not None:
                    notes.append(note)
            except PlanNotReady:  # a later review has the plan; a move must not rest on a guess
                log.info(
                    "review: attempt %s of job %s stays, its spot plan is not built yet", row.attempt.id, row.job.id
                )
            except Exception:  # the attempt is reviewed again later, and does not keep others from their review
                log.exception("review: attempt %s of job %s cannot be reviewed", row.attempt.id, row.job.id)
            decided_s += self._context.clock.monotonic() - began
            await asyncio.sleep(0)  # thousands of reviews must not delay heartbeats and requests
        if notes:
            await self._context.store.note(notes)
        return decided_s

    async def _decide(self, row: Leased, shared: _ReviewRound) -> Move | Stay:
        """Return the decision. Raises PlanNotReady if its plan could not be built in time."""
        facts = self._gather(row, shared)
        decision = await shared.plans.settle(partial(self._reviewed, facts))
        if isinstance(decision, Stay) or row.job.attempts <= 1:
            return decision
        earlier = await self._context.store.attempts(row.job.id)
        facts = replace(facts, earlier=tuple(attempt for attempt in earlier if not attempt.live))
        return await shared.plans.settle(partial(self._reviewed, facts))

    async def _reviewed(self, facts: ActiveReview) -> Move | Stay:
        return self.decide(facts)

    async def _gather_round(self, rows: Sequence[Leased]) -> _ReviewRound:
        context = self._context
        now, applied = await context.store.applied(sorted({(row.job.team, row.job.owner) for row in rows}))
        excluded = {**await context.store.blocked_offers(), **self._inventory.refusals}
        learned, caps = self._learned(), {name: provider.caps for name, provider in context.providers.items()}
        on_host = host_offers(self._market.offers, caps)
        return _ReviewRound(
            settings=context.placement_settings,
            learned=learned,
            now=now,
            applied=applied,
            refused_on_host={owner: await refused_offers(context.host_admission, owner, on_host) for owner in applied},
            lists=self._market.lists(learned, excluded),
            plans=context.plans.begin(has_fallback=False),
        )

    def _gather(self, row: Leased, shared: _ReviewRound) -> ActiveReview:
        job, owner = row.job, (row.job.team, row.job.owner)
        return ActiveReview(
            job=job,
            attempt=row.attempt,
            now=self._context.clock.now(),
            settings=shared.settings,
            offers=shared.lists.of(job.spec.resources, shared.refused_on_host[owner]),
            learned=shared.learned,
            plans=shared.plans,
            policies=shared.applied[owner],
            policies_at=shared.now,
            forbidden=self._context.forbidden(job.spec),
        )


def _note(row: Leased, decision: Move | Stay) -> Note | None:
    """Return the note that starts a move, or that reports a new reason to stay; None: nothing is new."""
    job, attempt = row.job, row.attempt
    if (event := review_event(job, attempt, decision)) is None:
        return None
    note = Note(attempt=attempt, job=job, forecast=job.forecast, idle=attempt.idle, events=(event,))
    if isinstance(decision, Stay):
        return replace(note, stays=decision.reason)
    return replace(note, signal=Signal.MOVE, reason=decision.message)
