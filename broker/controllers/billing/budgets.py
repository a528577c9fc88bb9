"""Budgets: reports reached thresholds once a window, and signals the attempts of a budget that drains.

Steps: read all policies with their spending, call `decide_budgets`, post its notices, signal the live attempts of
policies that drain. The windows are of trusted time, so a wrong clock of the database delays no drain.
Facts: policies with their spending, live attempts.
Decisions: `BudgetDecision`; for an attempt signal BUDGET or nothing, by `budget_drain_event`.
"""

from collections.abc import Sequence

from broker.controllers.base.context import ControllerContext
from broker.domain.job import Event, Signal
from broker.domain.policy import Policy
from broker.policy.budget_reports import budget_drain_event, decide_budgets
from broker.ports import Leased, Note


class Budgets:
    """Reads without a lease. The store accepts each notice and each signal once, from any broker."""

    name = "budgets"

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self.every_s = context.intervals.billing_s

    async def step(self) -> bool:
        store = self._context.store
        now, applied = await store.budgets()
        decision = decide_budgets(applied, now)
        for report in decision.reports:
            await store.post_threshold(report.policy_id, report.reached, report.notice, since=report.since)
        if decision.draining:
            await self._drain(decision.draining)
        return False

    async def _drain(self, draining: Sequence[Policy]) -> None:
        live = await self._context.store.live_attempts()
        events = [(row, budget_drain_event(row.job, row.attempt, draining)) for row in live]
        await self._context.store.note([_note(row, event) for row, event in events if event is not None])


def _note(row: Leased, event: Event) -> Note:
    return Note(
        attempt=row.attempt,
        job=row.job,
        forecast=row.job.forecast,
        idle=row.attempt.idle,
        signal=Signal.BUDGET,
        events=(event,),
    )
