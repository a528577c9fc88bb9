"""Digest: posts what was spent, once a day and once a week.

Steps: compute the due periods by `broker.reporting.digest.periods`, read their spending, post the notices of `digests`.
Facts: the clock, the spending of a period, live attempts.
Decisions: the notices of each period, one for each team and one for the installation.
"""

from broker.controllers.base.context import ControllerContext
from broker.reporting.digest import DigestPeriod, DigestPlan, RunningJob, digests, periods


class Digest:
    """Any number of brokers may run it. A notice's id follows from its period, so the store accepts it once."""

    name = "digest"
    every_s = 60.0

    def __init__(self, context: ControllerContext, plan: DigestPlan) -> None:
        self._context = context
        self._plan = plan
        self._posted: set[DigestPeriod] = set()

    async def step(self) -> bool:
        due_periods = set(periods(self._plan, self._context.clock.now()))
        for period in sorted(due_periods - self._posted, key=lambda period: period.every):
            await self._post(period)
        self._posted = due_periods
        return False

    async def _post(self, period: DigestPeriod) -> None:
        """Post the notices of a period. The store ignores those it has, so a restart costs one query."""
        store = self._context.store
        paid = await store.paid(period.window)
        running = [RunningJob(job=row.job, attempt=row.attempt) for row in await store.live_attempts()]
        running.sort(key=lambda row: (row.job.created_at, row.job.id))
        for notice in digests(period, paid, running):
            await store.post(notice)
