"""Says of launchers that they are through. Others cannot: only its own host knows that a launcher is at rest."""

from collections.abc import Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.domain.job import Attempt
from broker.ports import Store


class LauncherCompletion:
    """Terminating attempts that any broker may have leased, again and again; so this takes no lease.

    No create begins any more once an attempt is terminating. So what is through by then stays through.
    """

    name = "through"

    def __init__(self, context: ControllerContext, launchers: CreatesInFlight) -> None:
        self._context = context
        self._launchers = launchers
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        store: Store = self._context.store
        found: Sequence[Attempt] = await store.unproven_launches()
        known = [one for one in found if one.line.offer.provider in self._context.providers]
        told = await decide_batch(self._context, self.name, known, self._is_through)
        through = [one for one, is_through in told if is_through]
        if through:
            await store.launchers_through(through)
        return False

    async def _is_through(self, attempt: Attempt) -> bool:
        """Our own call that another broker has broken off is ended first."""
        if self._launchers.is_in_flight(attempt.name):
            await self._launchers.stop(attempt)
        return await self._launchers.dead_since(attempt) is not None
