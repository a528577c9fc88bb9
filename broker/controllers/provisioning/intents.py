"""Planned attempts, for which nothing was created yet: gathers the facts and words the decision as a change.

Used by the launch controller, which sends the creates. Decisions: see `IntentOutcome`.
Facts: signals, the age of the quote, the current offer, and creates that a restored backup lacks.
"""

from dataclasses import replace

from broker.controllers.base.context import ControllerContext
from broker.controllers.market.host_offers import host_refusal
from broker.controllers.market.offers_by_id import Offers, OffersById
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Job
from broker.lifecycle.decisions.intent_decision import (
    IntentDecision,
    IntentFacts,
    IntentOutcome,
    decide_intent,
    end_before_create,
    intent_events,
)
from broker.ports import Change, Leased


class Intents:
    def __init__(self, context: ControllerContext, restored: RestoredAttempts, offers: Offers) -> None:
        self._context = context
        self._restored = restored
        self._for_sale = OffersById(offers)

    async def decide(self, row: Leased) -> IntentDecision:
        return decide_intent(await self._gather(row))

    def may_be_sent(self, row: Leased) -> bool:
        """Return False if the attempt ends without a create, by the facts that need no request."""
        return end_before_create(self._local_facts(row)) is None

    async def _gather(self, row: Leased) -> IntentFacts:
        """Return all facts; the blob store shows creates that a restored backup lacks."""
        try:
            was_sent = await self._restored.was_sent(row.attempt)
            is_superseded = not was_sent and await self._restored.was_superseded(row.job, row.attempt)
        except BlobsUnavailable as e:
            return replace(self._local_facts(row), unreadable=str(e))
        facts = replace(self._local_facts(row), was_sent=was_sent, is_superseded=is_superseded)
        return replace(facts, forbidden=facts.forbidden or await self._refused_on_host(row))

    async def _refused_on_host(self, row: Leased) -> str:
        """Return why the job may no longer run on the daemon's host, as a user or team may have been added meanwhile.

        A create that was sent is looked up instead; its machine keeps the admission that it was created with.
        """
        if not self._context.provider_of(row.attempt).caps.runs_on_host:
            return ""
        return await host_refusal(self._context.host_admission, (row.job.team, row.job.owner))

    def _local_facts(self, row: Leased) -> IntentFacts:
        context, offer = self._context, row.attempt.line.offer
        return IntentFacts(
            job=row.job,
            attempt=row.attempt,
            now=context.clock.now(),
            launcher_id=context.provider_of(row.attempt).launcher_id(),
            quote_ttl_s=context.intervals.quote_ttl_s,
            price_rise=context.costs.price_rise,
            latest=self._for_sale.get(offer.id),
            offers_at=self._for_sale.seen_at(offer.provider),
            forbidden=context.forbidden(row.job.spec),
        )


def intent_change(job: Job, decision: IntentDecision) -> Change:
    """Return what is written for a decision. `job`: as it was claimed."""
    return Change(
        attempt=(decision.before, decision.attempt),
        job=(job, decision.job) if decision.outcome is IntentOutcome.END else None,
        ledger=decision.ledger,
        events=intent_events(decision),
        due_in_s=decision.due_in_s,
    )
