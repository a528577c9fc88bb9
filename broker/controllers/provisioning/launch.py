"""Launch: creates the machines of planned attempts once, by name, and adopts machines of creates that were lost.

Steps for an planned attempt: decide whether its create is sent (`Intents`), commit `create_sent_at`, call create,
write the decision of `after_create` on the outcome.
Steps for a launching attempt: gather `LaunchFacts`, call `advance_launch`, apply its decision.
Facts: signals, listings, heartbeats, the launcher's death; once the machines are proven absent, also the final report
and later attempts that a restored backup lacks. Decisions: see `LaunchStep` and `LaunchReport`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import launch_events
from broker.controllers.billing.charges import priced, surplus, up_to
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.observation.heartbeats import HeartbeatReader
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.controllers.provisioning.boot_spec import Boot
from broker.controllers.provisioning.create_calls import CreateCalls
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.provisioning.intents import Intents
from broker.controllers.provisioning.launch_facts import LaunchFactsReader
from broker.domain.job import AttemptState, Job
from broker.lifecycle.decisions.launch_decision import (
    CreateOutcome,
    CreateRefused,
    CreateUnknown,
    LaunchCharge,
    LaunchDecision,
    LaunchStep,
    advance_launch,
    after_create,
)
from broker.ports import Change, Charge, Lane, Leased
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

    async def close(self) -> None:
        """Cancel the creates under way. Their outcome is unknown, so the next process looks it up."""
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
        postponed = [row for row in planned if is_full and self._intents.never_sent(row) is None]
        if postponed:
            await context.store.release([], [row.attempt for row in postponed], due_in_s=self.every_s)
        if due := [row for row in planned if row not in postponed]:
            await self._send(due)
        launching = [row for row in leased if row.attempt.state is AttemptState.LAUNCHING]
        is_readable = await self._facts.read_heartbeats(launching)
        await decide_batch(context, self.name, launching, lambda row: self._advance(row, is_readable))
        return True

    # ------------------------------------------------------------------------------------------------------ planned

    async def _send(self, leased: list[Leased]) -> None:
        """Commit `create_sent_at` and then send the creates: from this commit on the name may exist, and is charged."""
        intents = await decide_batch(self._context, self.name, leased, self._intents.change)
        for row, (_, is_sent) in intents:
            if is_sent:
                self._launchers.register(row.attempt)
        written: list[bool] = [False] * len(intents)
        try:
            written = list(await self._context.store.apply([change for _, (change, _) in intents]))
        finally:
            for (row, (_, is_sent)), is_written in zip(intents, written, strict=True):
                if is_sent and not is_written:
                    self._launchers.release(row.attempt.name)
        for (row, (change, is_sent)), is_written in zip(intents, written, strict=True):
            if is_written and change.attempt and is_sent:
                self._start(Leased(attempt=change.attempt[1], job=row.job), first=True)

    def _start(self, leased: Leased, *, first: bool) -> None:
        self._launchers.attach(leased.attempt.name, self._creates.start(self._create(leased, first)))

    async def _create(self, leased: Leased, first: bool) -> None:
        """Call create and write what becomes of the attempt. `first`: no create of this name was ever sent."""
        outcome = await self._calls.create(leased, is_first=first)
        await self._write_outcome(leased, outcome)
        if isinstance(outcome, CreateUnknown) and outcome.error is not None:
            raise outcome.error

    async def _write_outcome(self, leased: Leased, outcome: CreateOutcome) -> None:
        """Write the decision on an outcome for as long as the attempt is launching.

        Another lease of the attempt does not matter: its holder changes nothing before the launcher is proven dead.
        """
        if isinstance(outcome, CreateRefused):
            await self._calls.block(leased.attempt, outcome)
        while not await self._write(leased.job, self._after_create(leased, outcome)):
            attempts = await self._context.store.attempts_by_id([leased.attempt.id])
            current = attempts.get(leased.attempt.id)
            if current is None or current.state is not AttemptState.LAUNCHING:
                return
            leased = replace(leased, attempt=current)

    def _after_create(self, leased: Leased, outcome: CreateOutcome) -> LaunchDecision:
        launcher_id = self._context.provider_of(leased.attempt).launcher_id()
        now = self._context.clock.now()
        return after_create(leased.attempt, outcome, now, launcher_id=launcher_id, poll_s=self.every_s)

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
                    await self._adopt(observed, await self._calls.confirm(decision.before, leased.job, facts.look.seen))
                case LaunchStep.CREATE:
                    await self._create_again(observed, decision)
                case LaunchStep.WRITE:
                    await self._end(observed, decision)
                case _:
                    assert_never(decision.step)

    async def _wait(self, leased: Leased, decision: LaunchDecision) -> None:
        if decision.attempt == decision.before:
            await self._context.store.release([], [leased.attempt], due_in_s=decision.due_in_s)
        else:
            await self._write(leased.job, decision)

    async def _adopt(self, leased: Leased, outcome: CreateOutcome) -> None:
        """Write the outcome of a confirmation. Only a refusal is written again after the lease was lost."""
        if isinstance(outcome, CreateRefused):
            await self._write_outcome(leased, outcome)
        else:
            await self._write(leased.job, self._after_create(leased, outcome))

    async def _create_again(self, leased: Leased, decision: LaunchDecision) -> None:
        """Send another create under the same name and the first `create_sent_at`, so that all its time is charged."""
        attempt = leased.attempt
        self._launchers.register(attempt)
        launcher_id = self._context.provider_of(attempt).launcher_id()
        decision = replace(decision, attempt=replace(decision.attempt, launched_by=launcher_id))
        try:
            is_written = await self._write(leased.job, decision)
        except BaseException:
            self._launchers.release(attempt.name)
            raise
        if is_written:
            self._start(Leased(attempt=decision.attempt, job=leased.job), first=False)
        else:
            self._launchers.release(attempt.name)

    async def _end(self, leased: Leased, decision: LaunchDecision) -> None:
        if not await self._write(leased.job, decision):  # billing has charged it meanwhile, or its lease was lost
            await self._context.store.release([], [leased.attempt], due_in_s=0.0)
        elif decision.cancels_launcher:
            await self._launchers.stop(leased.attempt)

    # --------------------------------------------------------------------------------------------------------- apply

    async def _write(self, job: Job, decision: LaunchDecision) -> bool:
        """Write a decision under the fence; return False if the fence refused it."""
        attempt = decision.attempt
        change = Change(
            attempt=(decision.before, attempt),
            charge=self._charge(decision),
            events=launch_events(job, decision),
            due_in_s=decision.due_in_s,
        )
        (is_written,) = await self._context.store.apply([change])
        if is_written and attempt.state is AttemptState.BOOTING:
            # Follow its machines from now on: the database may be unreachable when billing asks for them.
            self._inventory.missing_twice_at(attempt.line.offer.provider, attempt.name, born_by=attempt.booted_at)
        return is_written

    def _charge(self, decision: LaunchDecision) -> Charge | None:
        match decision.charge:
            case LaunchCharge.UP_TO_NOW:
                return up_to(decision.before, self._context.clock.now())
            case LaunchCharge.EXTRA_LISTED:
                return surplus(self._context, self._inventory, decision.before)
            case LaunchCharge.EXTRA_CREATED:
                return priced(decision.before, decision.prices)
        return None
