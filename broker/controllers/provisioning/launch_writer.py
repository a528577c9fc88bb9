"""Writes the decisions about launching attempts, with their charges and events, under the fence of the attempt.

Used by the launch controller. Decisions: `broker.lifecycle.decisions.launch_decision`.
"""

from dataclasses import dataclass, replace

from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import launch_events
from broker.controllers.billing.charges import priced, surplus, up_to
from broker.controllers.observation.inventory import Inventory
from broker.controllers.provisioning.create_calls import CreateCalls
from broker.domain.job import AttemptState, Job
from broker.lifecycle.decisions.launch_decision import (
    CreateOutcome,
    CreateRefused,
    LaunchCharge,
    LaunchDecision,
    after_create,
)
from broker.ports import Change, Charge, Leased


@dataclass(frozen=True, kw_only=True)
class LaunchWriter:
    context: ControllerContext
    inventory: Inventory
    calls: CreateCalls
    poll_s: float
    """Seconds until a create of unknown outcome is looked up."""

    async def write(self, job: Job, decision: LaunchDecision) -> bool:
        """Write a decision; return False if the fence refused it."""
        attempt = decision.attempt
        change = Change(
            attempt=(decision.before, attempt),
            charge=self._charge(decision),
            events=launch_events(job, decision),
            due_in_s=decision.due_in_s,
        )
        (is_written,) = await self.context.store.apply([change])
        if is_written and attempt.state is AttemptState.BOOTING:
            # Follow its machines from now on: the database may be unreachable when billing asks for them.
            self.inventory.missing_twice_at(attempt.line.offer.provider, attempt.name, born_by=attempt.booted_at)
        return is_written

    async def write_outcome(self, leased: Leased, outcome: CreateOutcome) -> None:
        """Write the decision on the outcome of a create; retry a refused write while the attempt is launching.

        A lease that another broker took meanwhile does not prevent the write. That broker changes nothing before the
        launcher is proven dead.
        """
        if isinstance(outcome, CreateRefused):
            await self.calls.block(leased.attempt, outcome)
        while not await self._write_once(leased, outcome):
            attempts = await self.context.store.attempts_by_id([leased.attempt.id])
            current = attempts.get(leased.attempt.id)
            if current is None or current.state is not AttemptState.LAUNCHING:
                return
            leased = replace(leased, attempt=current)

    async def write_confirmation(self, leased: Leased, outcome: CreateOutcome) -> None:
        """Write the outcome of `CreateCalls.confirm`. Only the write of a refusal is retried after a lost lease."""
        if isinstance(outcome, CreateRefused):
            await self.write_outcome(leased, outcome)
        else:
            await self._write_once(leased, outcome)

    async def _write_once(self, leased: Leased, outcome: CreateOutcome) -> bool:
        launcher_id = self.context.provider_of(leased.attempt).launcher_id()
        now = self.context.clock.now()
        decision = after_create(leased.attempt, outcome, now, launcher_id=launcher_id, poll_s=self.poll_s)
        return await self.write(leased.job, decision)

    def _charge(self, decision: LaunchDecision) -> Charge | None:
        match decision.charge:
            case LaunchCharge.UP_TO_NOW:
                return up_to(decision.before, self.context.clock.now())
            case LaunchCharge.EXTRA_LISTED:
                return surplus(self.context, self.inventory, decision.before)
            case LaunchCharge.EXTRA_CREATED:
                return priced(decision.before, decision.prices)
        return None
