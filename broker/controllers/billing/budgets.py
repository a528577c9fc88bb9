"""Budgets: reports reached thresholds once a window, and signals the attempts of a budget that drains.

Steps: read all policies with their spending, post a notice for each reached threshold, signal the live attempts of
policies that drain. The windows are of trusted time, so a wrong clock of the database delays no drain.
Facts: policies with their spending, live attempts.
Decisions: a notice, signal BUDGET or nothing; see `broker.policy.budgets.reached` and `drains`.
"""

from collections.abc import Sequence
from datetime import datetime

from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.domain.job import Signal
from broker.domain.notifications import Notice
from broker.policy.budgets import Applied, Reached, drains, reached, reached_message
from broker.policy.windows import window_start
from broker.ports import Leased, Note


class Budgets:
    """Reads without a lease. The store accepts each notice and each signal once, from any broker."""

    name = "budgets"

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self.every_s = context.intervals.billing_s

    async def step(self) -> bool:
        now, applied = await self._context.store.budgets()
        for policy in applied:
            for reached_threshold in reached(policy.policy, policy.usage):
                await self._report(policy, reached_threshold, now)
        draining = [
            (policy, threshold) for policy in applied if (threshold := drains(policy.policy, policy.usage)) is not None
        ]
        if draining:
            await self._drain(draining)
        return False

    async def _report(self, applied: Applied, reached_threshold: Reached, now: datetime) -> None:
        budget, threshold, policy = reached_threshold.budget, reached_threshold.threshold, applied.policy
        notice_id = f"budget-{applied.id}-{budget.key}-{threshold.at}-{threshold.action}-{int(now.timestamp())}"
        notice = Notice(
            id=notice_id.replace(".", "_").replace("/", "-"),
            kind="budget.threshold",
            team=policy.team,
            message=reached_message(policy, reached_threshold, now),
            data={
                "policy": policy.name,
                "budget": budget.key,
                "at": str(threshold.at),
                "action": threshold.action.value,
                "charged_usd": str(reached_threshold.charged_usd),
                "limit_usd": str(budget.limit_usd),
            },
        )
        since = window_start(budget, policy.zone, now)
        await self._context.store.post_threshold(applied.id, reached_threshold, notice, since=since)

    async def _drain(self, draining: Sequence[tuple[Applied, Reached]]) -> None:
        live = await self._context.store.live_attempts()
        notes = [
            self._note(row, policy) for row in live if row.attempt.signal is None for policy in _first(row, draining)
        ]
        await self._context.store.note(notes)

    def _note(self, row: Leased, applied: Applied) -> Note:
        message = (
            f"policy {applied.policy.name} drains: checkpoint and stop; the job continues when the budget allows it"
        )
        report = event(row.job, "job.budget_drain", message, attempt=row.attempt, data={"policy": applied.policy.name})
        return Note(
            attempt=row.attempt,
            job=row.job,
            forecast=row.job.forecast,
            idle=row.attempt.idle,
            signal=Signal.BUDGET,
            events=(report,),
        )


def _first(row: Leased, draining: Sequence[tuple[Applied, Reached]]) -> Sequence[Applied]:
    """Return the first policy that drains this attempt; empty: no policy does."""
    return [policy for policy, _ in draining if policy.policy.covers(row.job.team, row.job.owner)][:1]
