"""Tells people once a day and once a week what was spent."""

from broker.controllers.base.context import ControllerContext
from broker.reporting.digest import DigestPeriod, DigestPlan, RunningJob, digests, periods


class Digest:
    """Any number of brokers may run it: a period's notice is posted once, since its id follows from the period."""

    name = "digest"
    every_s = 60.0

    def __init__(self, context: ControllerContext, plan: DigestPlan) -> None:
        self._context = context
        self._plan = plan
        self._told: set[DigestPeriod] = set()

    async def step(self) -> bool:
        due = set(periods(self._plan, self._context.clock.now()))
        for period in sorted(due - self._told, key=lambda one: one.every):
            await self._tell(period)
        self._told = due
        return False

    async def _tell(self, period: DigestPeriod) -> None:
        """Of a period that was told already nothing is posted again, so a restart costs one query."""
        store = self._context.store
        paid = await store.paid(period.window)
        running = [RunningJob(job=one.job, attempt=one.attempt) for one in await store.live_attempts()]
        running.sort(key=lambda one: (one.job.created_at, one.job.id))
        for notice in digests(period, paid, running):
            await store.post(notice)
