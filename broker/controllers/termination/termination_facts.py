"""Gathers the facts about a terminating attempt for `broker.lifecycle.decisions.termination_decision.terminate`."""

from collections.abc import Set
from dataclasses import replace

from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.charges import moved_prices, self_stopped_by
from broker.controllers.observation.heartbeats import read_final
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import drain_reason_sent
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Attempt
from broker.lifecycle.decisions.termination_facts import (
    EndFactsNeeded,
    EndReport,
    MissingEndFacts,
    TerminationFacts,
    TerminationSettings,
)
from broker.lifecycle.host_reputation import MAX_ATTEMPTS, MEMORY_S, WEIGHTS
from broker.lifecycle.observation.proof import AbsenceProof
from broker.ports import Leased


class TerminationFactsReader:
    """Reads launchers, listings, the blob store and the database."""

    def __init__(self, context: ControllerContext, inventory: Inventory, launchers: CreatesInFlight) -> None:
        self._context, self._inventory, self._launchers = context, inventory, launchers
        intervals = context.intervals
        self._settings = TerminationSettings(
            look_s=intervals.look_s, destroy_alert=intervals.destroy_alert, sold_out_s=intervals.sold_out_s
        )

    async def gather(self, row: Leased, unlisted: Set[str]) -> TerminationFacts:
        """Return the facts that every decision needs. `unlisted`: clouds that did not answer the latest listing."""
        attempt, inventory, context = row.attempt, self._inventory, self._context
        offer = attempt.line.offer
        provider, is_listed = offer.provider, offer.provider not in unlisted
        dead_since = await self._launchers.dead_since(attempt)
        absence, last_possible_end = AbsenceProof(), None
        if is_listed and not attempt.booted_at:
            last_possible_end = inventory.latest_possible_end(attempt)
        if is_listed and dead_since is not None:
            absence = inventory.absence(provider, attempt.name, dead_since, born_by=attempt.booted_at)
        return TerminationFacts(
            job=row.job,
            attempt=attempt,
            now=context.clock.now(),
            settings=self._settings,
            is_listed=is_listed,
            error=inventory.trouble(provider),
            exists=is_listed and inventory.is_listed(provider, attempt.name),
            machines=inventory.listed(provider, attempt.name),
            is_launcher_dead=dead_since is not None,
            absence=absence,
            last_possible_end=last_possible_end,
            self_stopped_by=self_stopped_by(context, inventory, attempt, row.job) if absence.proven else None,
            host_trust=offer.trust or context.provider_of(attempt).caps.trust,
        )

    async def gather_more(self, needed: EndFactsNeeded) -> TerminationFacts:
        """Return the facts with the missing ones added, or with the failure of the blob store."""
        facts, store = needed.facts, self._context.store
        attempt = facts.attempt
        if needed.missing is MissingEndFacts.HOST_RECORD:
            key, kinds = attempt.line.offer.host_key, tuple(WEIGHTS)
            record = await store.ended_at_host(key, kinds, within_s=MEMORY_S, limit=MAX_ATTEMPTS)
            return replace(facts, host_record=record)
        if needed.missing is MissingEndFacts.EARLIER_ATTEMPTS:
            others = [row for row in await store.attempts(attempt.job_id) if row.id != attempt.id]
            facts = replace(facts, earlier_attempts=others)
        else:
            try:
                facts = replace(facts, report=await self._report(attempt))
            except BlobsUnavailable:
                return replace(facts, is_report_unreadable=True)
        prices = tuple(moved_prices(self._context, self._inventory, attempt))
        return replace(facts, now=self._context.clock.now(), prices=prices)

    async def _report(self, attempt: Attempt) -> EndReport:
        """Read the documents that explain the end. Raises BlobsUnavailable."""
        final = attempt.final or await read_final(self._context, attempt.id)
        drain_reason = await drain_reason_sent(self._context, attempt.id, final) if final else None
        return EndReport(final=final, drain_reason=drain_reason)
