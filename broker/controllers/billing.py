"""Every live attempt is charged by its provider's quantum; near the cap the signal is raised."""

import logging

from broker.controllers.context import Context
from broker.controllers.events import event
from broker.decide.billing import cap_is_near, owed
from broker.domain.money import ZERO, show
from broker.ports import Charge, Leased

log = logging.getLogger(__name__)


class Billing:
    """Reads without a lease and writes fenced by `charged_to`: two brokers cannot charge the same time twice."""

    name = "billing"

    def __init__(self, context: Context) -> None:
        self._context = context
        self.every_s = context.rhythm.billing_s

    async def step(self) -> bool:
        charges = [c for c in map(self._safely, await self._context.store.live_attempts()) if c is not None]
        if charges:
            await self._context.store.charge(charges)
        return False

    def _safely(self, one: Leased) -> Charge | None:
        """No attempt that cannot be charged keeps the others from their caps."""
        try:
            return self._charge(one)
        except Exception:
            log.exception("billing: attempt %s of job %s cannot be charged", one.attempt.id, one.job.id)
            return None

    def _charge(self, one: Leased) -> Charge | None:
        attempt, job, context = one.attempt, one.job, self._context
        if attempt.create_sent_at is None:
            return None
        now = context.clock.now()
        due = owed(attempt, now)
        near = not attempt.cap_near and cap_is_near(
            attempt,
            job,
            context.provider_of(attempt).caps,
            now,
            tick_s=context.rhythm.billing_s,
            drain_s=context.limits.drain_s,
        )
        if due == ZERO and not near:
            return None
        message = f"{show(job.spent_usd + due)} of {show(job.cap_usd)} spent: checkpoint and stop"
        return Charge(
            attempt_id=attempt.id,
            job_id=job.id,
            since=attempt.charged_to,
            to=max(now, attempt.charged_to or now),
            usd=due,
            cap_near=near,
            event=event(job, "job.cap_near", message, attempt=attempt) if near else None,
        )
