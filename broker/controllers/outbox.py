"""Events go to people at least once; a notifier that fails is asked again when the lease is over."""

import logging
from collections.abc import Sequence

from broker.controllers.context import Context
from broker.domain.channel import Channel, Delivery
from broker.domain.job import Event
from broker.ports import Notifier

log = logging.getLogger(__name__)

LEASE_S = 30.0


class Outbox:
    name = "outbox"

    def __init__(self, context: Context, notifiers: Sequence[Notifier]) -> None:
        self._context = context
        self._notifiers = notifiers
        self._log = Channel(id="log", kind="log", name="log", team=None, created_at=context.clock.now())
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        context = self._context
        events = await context.store.claim_outbox(owner=context.owner, lease_s=LEASE_S, limit=context.rhythm.claim)
        told = [event for event in events if await self._tell(event)]
        if told:
            await context.store.delivered(told)
        return len(events) == context.rhythm.claim

    async def _tell(self, event: Event) -> bool:
        """True when every notifier has had it."""
        for notifier in self._notifiers:
            try:
                delivery = Delivery(stream=event.job_id, event=event)
                await notifier.deliver(self._log, delivery, None, None)
            except Exception as e:
                log.warning("%s: event %s/%d not delivered: %s", type(notifier).__name__, event.job_id, event.seq, e)
                return False
        return True
