"""Termination: destroys terminating attempts until their absence is proven, and then closes their ledger.

Steps: list the clouds; for each attempt gather `TerminationFacts`, call `terminate`, and apply its decision: send the
destroys and decide again (`after_destroy`), block offers, write. Delete the heartbeats of attempts that ended. Facts:
launcher, listings, prices. Once the machines are proven absent: the final report, the drain request, earlier attempts
of the job, the record of the host. Decisions: see `TerminationStep`.
"""

from collections.abc import Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.charges import surplus
from broker.controllers.observation.inventory import Inventory
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.termination_facts import TerminationFactsReader
from broker.domain.errors import BlobsUnavailable, Gone, GpubrokerError, ProviderError
from broker.domain.job import Attempt, Handle
from broker.lifecycle.decisions.termination_decision import after_destroy, terminate, termination_events
from broker.lifecycle.decisions.termination_facts import (
    EndFactsNeeded,
    TerminationDecision,
    TerminationFacts,
    TerminationStep,
)
from broker.ports import Change, Charge, Lane, Leased
from broker.runtime.background_tasks import gather_all
from trainer.contract import object_keys


class Termination:
    """Claims attempts that are terminating, and never gives up."""

    name = "termination"

    def __init__(
        self, context: ControllerContext, inventory: Inventory, launchers: CreatesInFlight, destroys: Destroys
    ) -> None:
        self._context, self._inventory = context, inventory
        self._launchers, self._destroys = launchers, destroys
        self._facts = TerminationFactsReader(context, inventory, launchers)
        self._claims = Claims(context, Lane.TERMINATION)
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        async with self._claims.leased(
            limit=self._context.intervals.claim, turns=self._context.no_wait_turns
        ) as leased:
            return bool(leased) and await self._end_all(leased)

    async def _end_all(self, leased: Sequence[Leased]) -> bool:
        context = self._context
        # Attempts at a cloud that did not answer do not end in this round.
        unlisted = await self._inventory.refresh_all({row.attempt.line.offer.provider for row in leased})
        try:
            ends = await decide_batch(context, self.name, leased, lambda row: self._end_attempt(row, unlisted))
        except (GpubrokerError, TimeoutError):
            await context.store.release([], [row.attempt for row in leased], due_in_s=context.intervals.look_s)
            raise
        decided = {row.attempt.id for row, _ in ends}
        if undecided := [row.attempt for row in leased if row.attempt.id not in decided]:
            await context.store.release([], undecided, due_in_s=context.intervals.look_s)
        are_written = await context.store.apply([change for _, change in ends])
        for (row, change), is_written in zip(ends, are_written, strict=True):
            if not is_written:
                # Billing charged the attempt meanwhile: it is decided again at once, not when its lease expires.
                await context.store.release([], [row.attempt], due_in_s=0.0)
            elif change.attempt and not change.attempt[1].live:
                await self._clean_up(row.attempt)
        return len(leased) == context.intervals.claim and not unlisted

    async def _end_attempt(self, row: Leased, unlisted: set[str]) -> Change:
        """Gather, decide and act for one attempt; return what must be written."""
        facts = await self._facts.gather(row, unlisted)
        while isinstance(decision := terminate(facts), EndFactsNeeded):
            facts = await self._facts.gather_more(decision)
        if decision.step is TerminationStep.DESTROY:
            decision = await self._destroy(facts, decision)
        for block in decision.blocks:
            await self._context.store.block_offer(block.key, block.reason, for_s=block.for_s)
        return self._change(decision)

    async def _destroy(self, facts: TerminationFacts, decision: TerminationDecision) -> TerminationDecision:
        """Send the destroys, and ask the launcher to stop if it may be alive."""
        provider = facts.attempt.line.offer.provider
        errors = await gather_all(self._request_destroy(provider, handle) for handle in decision.destroys)
        if decision.stops_launcher:
            await self._launchers.stop(decision.attempt)
        return after_destroy(facts, decision, errors, self._context.clock.now())

    async def _request_destroy(self, provider: str, handle: Handle) -> str:
        """Send a destroy. Return why the cloud has not accepted it, in one line; empty: no error so far."""
        try:
            await self._destroys.ask(provider, handle)
        except Gone:
            return ""
        except ProviderError as e:
            return f"destroy of {handle.id} at {provider}: {e}"
        return ""

    def _change(self, decision: TerminationDecision) -> Change:
        return Change(
            attempt=(decision.before, decision.attempt),
            job=None if decision.job_after is None else (decision.job, decision.job_after),
            charge=self._charge(decision),
            ledger=decision.ledger,
            events=termination_events(decision),
            observation=decision.observation,
            due_in_s=decision.due_in_s,
        )

    def _charge(self, decision: TerminationDecision) -> Charge | None:
        """Return the final charge, or the charge that records extra machines before their destroys; None: neither."""
        if decision.step is TerminationStep.DESTROY:
            return surplus(self._context, self._inventory, decision.attempt)
        last, before = decision.charge, decision.before
        if last is None:
            return None
        return Charge(
            attempt_id=before.id,
            job_id=before.job_id,
            since=before.charged_to,
            to=max(last.until, before.charged_to or last.until),
            usd=last.usd,
            traffic_usd=last.traffic_usd,
            prices=last.prices,
        )

    async def _clean_up(self, attempt: Attempt) -> None:
        """Delete the heartbeats of an ended attempt, which would make every LIST longer. A failure does no harm."""
        try:
            for node in range(attempt.line.nodes):
                await self._context.blobs.delete(object_keys.heartbeat(attempt.id, node))
        except BlobsUnavailable:
            return
