"""Marks launchers of this host as finished. Only the host that started a launcher can observe that it has exited."""

from collections.abc import Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.domain.job import Attempt
from broker.ports import Store


class LauncherCompletion:
    """Reads terminating attempts without a lease, since any broker may hold their leases.

    No create begins once an attempt is terminating, so a launcher that has finished by then stays finished.
    """

    name = "through"

    def __init__(self, context: ControllerContext, launchers: CreatesInFlight) -> None:
        self._context = context
        self._launchers = launchers
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        store: Store = self._context.store
        attempts: Sequence[Attempt] = await store.unproven_launches()
        known_here = [attempt for attempt in attempts if attempt.line.offer.provider in self._context.providers]
        decisions = await decide_batch(self._context, self.name, known_here, self._is_through)
        finished = [attempt for attempt, is_finished in decisions if is_finished]
        if finished:
            await store.launchers_through(finished)
        return False

    async def _is_through(self, attempt: Attempt) -> bool:
        """Return True if the launcher has finished. Our own call, which another broker gave up, is cancelled first."""
        if self._launchers.is_in_flight(attempt.name):
            await self._launchers.stop(attempt)
        return await self._launchers.dead_since(attempt) is not None
