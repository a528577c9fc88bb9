"""What policies do once money is spent: thresholds are told, once a window, and a budget that drains stops its jobs."""

from collections.abc import Sequence
from datetime import datetime

from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.domain.job import Signal
from broker.domain.notifications import Notice
from broker.policy.budgets import Applied, Reached, drains, reached, told_reached
from broker.policy.windows import window_start
from broker.ports import Leased, Note


class Budgets:
    """Reads without a lease. What is told is told by one broker; a signal is raised once, whoever raises it."""

    name = "budgets"

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self.every_s = context.rhythm.billing_s

    async def step(self) -> bool:
        now, applied = await self._context.store.budgets()
        for one in applied:
            for found in reached(one.policy, one.standing):
                await self._tell(one, found, now)
        draining = [(one, why) for one in applied if (why := drains(one.policy, one.standing)) is not None]
        if draining:
            await self._drain(draining)
        return False

    async def _tell(self, one: Applied, found: Reached, now: datetime) -> None:
        budget, threshold, policy = found.budget, found.threshold, one.policy
        own = f"budget-{one.id}-{budget.key}-{threshold.at}-{threshold.action}-{int(now.timestamp())}"
        notice = Notice(
            id=own.replace(".", "_").replace("/", "-"),
            kind="budget.threshold",
            team=policy.team,
            message=told_reached(policy, found, now),
            data={
                "policy": policy.name,
                "budget": budget.key,
                "at": str(threshold.at),
                "action": threshold.action.value,
                "charged_usd": str(found.charged_usd),
                "limit_usd": str(budget.limit_usd),
            },
        )
        since = window_start(budget, policy.zone, now)
        await self._context.store.post_threshold(one.id, found, notice, since=since)

    async def _drain(self, draining: Sequence[tuple[Applied, Reached]]) -> None:
        live = await self._context.store.live_attempts()
        notes = [self._note(one, why) for one in live if one.attempt.signal is None for why in _first(one, draining)]
        await self._context.store.note(notes)

    def _note(self, one: Leased, why: Applied) -> Note:
        message = f"policy {why.policy.name} drains: checkpoint and stop; the job goes on when the budget allows it"
        told = event(one.job, "job.budget_drain", message, attempt=one.attempt, data={"policy": why.policy.name})
        return Note(
            attempt=one.attempt,
            job=one.job,
            forecast=one.job.forecast,
            idle=one.attempt.idle,
            signal=Signal.BUDGET,
            events=(told,),
        )


def _first(one: Leased, draining: Sequence[tuple[Applied, Reached]]) -> Sequence[Applied]:
    """The first policy that drains this attempt, if one does."""
    return [policy for policy, _ in draining if policy.policy.covers(one.job.team, one.job.owner)][:1]
