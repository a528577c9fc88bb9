"""Launch: creates the machines of planned attempts once, by name, and adopts machines of creates that were lost.

Steps for a planned attempt: decide whether its create is sent (`Intents`), commit `create_sent_at`, call create, write
the decision of `after_create` on the outcome.
Steps for a launching attempt: gather `LaunchFacts`, call `advance_launch`, apply its decision.
Facts: signals, listings, heartbeats, the launcher's death; once the machines are proven absent, also the final report
and later attempts that a restored backup lacks. Decisions: see `IntentOutcome`, `LaunchStep` and `LaunchReport`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.observation.heartbeats import HeartbeatReader
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.controllers.provisioning.boot_spec import Boot
from broker.controllers.provisioning.create_calls import CreateCalls
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.provisioning.intents import Intents, intent_change
from broker.controllers.provisioning.launch_facts import LaunchFactsReader
from broker.controllers.provisioning.launch_writer import LaunchWriter
from broker.domain.job import AttemptState
from broker.lifecycle.decisions.intent_decision import IntentOutcome
from broker.lifecycle.decisions.launch_decision import CreateUnknown, LaunchDecision, LaunchStep, advance_launch
from broker.ports import Lane, Leased
from broker.runtime.background_tasks import Tasks


class Launch:
    """Claims attempts that are planned or launching."""

    name = "launch"

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        launchers: CreatesInFlight,
        boot: Boot,
        beats: HeartbeatReader,
        offers: Offers,
    ) -> None:
        self._context, self._inventory, self._launchers = context, inventory, launchers
        self._restored = RestoredAttempts(context, inventory)
        self._intents = Intents(context, self._restored, offers)
        self._facts = LaunchFactsReader(context, inventory, launchers, beats, self._restored)
        self._calls = CreateCalls(context=context, launchers=launchers, boot=boot)
        self._claims = Claims(context, Lane.LAUNCH)
        self._creates = Tasks()
        self.every_s = context.intervals.poll_s
        self._writer = LaunchWriter(context=context, inventory=inventory, calls=self._calls, poll_s=self.every_s)

    async def close(self) -> None:
        """Cancel the creates in flight. Their outcome is unknown, so the next process looks it up."""
        await self._creates.cancel()

    async def step(self) -> bool:
        context = self._context
        self._restored.begin()
        free = context.intervals.creates - self._launchers.in_flight
        is_full = free <= 0
        if is_full and await self._creates.one_done(self.every_s):
            return True
        # Poll launching attempts even when all create slots are busy, so that a stop and the cap still take effect.
        limit = context.intervals.claim if is_full else min(free, context.intervals.claim)
        async with self._claims.leased(limit=limit, turns=self._inventory.turns) as leased:
            return bool(leased) and await self._work_on(leased, is_full=is_full)

    async def _work_on(self, leased: Sequence[Leased], *, is_full: bool) -> bool:
        context = self._context
        planned = [row for row in leased if row.attempt.state is AttemptState.PLANNED]
        postponed = [row for row in planned if is_full and self._intents.may_be_sent(row)]
        if postponed:
            await context.store.release([], [row.attempt for row in postponed], due_in_s=self.every_s)
        if ready := [row for row in planned if row not in postponed]:
            await self._send(ready)
        launching = [row for row in leased if row.attempt.state is AttemptState.LAUNCHING]
        is_readable = await self._facts.read_heartbeats(launching)
        await decide_batch(context, self.name, launching, lambda row: self._advance(row, is_readable))
        return True

    # ------------------------------------------------------------------------------------------------------ planned

    async def _send(self, leased: list[Leased]) -> None:
        """Commit `create_sent_at` and then send the creates. After the commit, machines may exist and are charged."""
        decided = await decide_batch(self._context, self.name, leased, self._intents.decide)
        sending = [row for row, decision in decided if decision.outcome is IntentOutcome.SEND]
        for row in sending:
            self._launchers.register(row.attempt)
        refused = {row.attempt.id for row in sending}
        try:
            changes = [intent_change(row.job, decision) for row, decision in decided]
            written = await self._context.store.apply(changes)
            refused -= {row.attempt.id for (row, _), is_written in zip(decided, written, strict=True) if is_written}
        finally:
            for row in sending:
                if row.attempt.id in refused:
                    self._launchers.release(row.attempt.name)
        for row, decision in decided:
            if decision.outcome is IntentOutcome.SEND and row.attempt.id not in refused:
                self._start(Leased(attempt=decision.attempt, job=row.job), first=True)

    def _start(self, leased: Leased, *, first: bool) -> None:
        self._launchers.attach(leased.attempt.name, self._creates.start(self._create(leased, first)))

    async def _create(self, leased: Leased, first: bool) -> None:
        """Call create and write the decision on its outcome. `first`: no create of this name was ever sent."""
        outcome = await self._calls.create(leased, is_first=first)
        await self._writer.write_outcome(leased, outcome)
        if isinstance(outcome, CreateUnknown) and outcome.error is not None:
            raise outcome.error

    # ----------------------------------------------------------------------------------------------------- launching

    async def _advance(self, leased: Leased, is_readable: bool) -> None:
        """Gather, decide and apply for one attempt whose create has not answered."""
        with self._claims.writing():
            facts = await self._facts.gather(leased, is_readable=is_readable)
            decision = advance_launch(facts)
            observed = Leased(attempt=decision.before, job=leased.job)
            match decision.step:
                case LaunchStep.WAIT:
                    await self._wait(leased, decision)
                case LaunchStep.CONFIRM:
                    outcome = await self._calls.confirm(decision.before, leased.job, facts.observation.listed)
                    await self._writer.write_confirmation(observed, outcome)
                case LaunchStep.CREATE:
                    await self._create_again(observed, decision)
                case LaunchStep.WRITE:
                    await self._end_launch(observed, decision)
                case _:
                    assert_never(decision.step)

    async def _wait(self, leased: Leased, decision: LaunchDecision) -> None:
        if decision.attempt == decision.before:
            await self._context.store.release([], [leased.attempt], due_in_s=decision.due_in_s)
        else:
            await self._writer.write(leased.job, decision)

    async def _create_again(self, leased: Leased, decision: LaunchDecision) -> None:
        """Send another create under the same name. `create_sent_at` stays, so that the time since then is charged."""
        attempt = leased.attempt
        self._launchers.register(attempt)
        launcher_id = self._context.provider_of(attempt).launcher_id()
        decision = replace(decision, attempt=replace(decision.attempt, launched_by=launcher_id))
        try:
            is_written = await self._writer.write(leased.job, decision)
        except BaseException:
            self._launchers.release(attempt.name)
            raise
        if is_written:
            self._start(Leased(attempt=decision.attempt, job=leased.job), first=False)
        else:
            self._launchers.release(attempt.name)

    async def _end_launch(self, leased: Leased, decision: LaunchDecision) -> None:
        if not await self._writer.write(leased.job, decision):  # charged meanwhile, or its lease was lost
            await self._context.store.release([], [leased.attempt], due_in_s=0.0)
        elif decision.cancels_launcher:
            await self._launchers.stop(leased.attempt)
