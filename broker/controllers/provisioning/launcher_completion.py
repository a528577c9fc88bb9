"""Marks launchers as finished, so that their attempts can end.

Steps: read terminating attempts with an unfinished launcher, ask each launcher, record those that have finished.
Facts: the creates in flight of this process, the state of the launcher's process.
Decisions: a launcher has finished, or may still create machines.

Only the host that started a launcher can observe that it has exited. If that host or its state folder is lost, an
operator confirms that the launcher creates nothing any more (`confirm_lost`). Until then the attempt stays terminating
and its job waits, because a machine may still appear.
"""

from collections.abc import Sequence

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.domain.errors import GpubrokerError
from broker.domain.instance import Liveness
from broker.domain.job import Attempt
from broker.ports import Change, Provider, Store


class LauncherCompletion:
    """Reads terminating attempts without a lease, since any broker may hold their leases.

    No create begins once an attempt is terminating, so a launcher that has finished by then stays finished.
    """

    name = "launcher_completion"

    def __init__(self, context: ControllerContext, launchers: CreatesInFlight) -> None:
        self._context = context
        self._launchers = launchers
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        store: Store = self._context.store
        attempts: Sequence[Attempt] = await store.unproven_launches()
        known_here = [attempt for attempt in attempts if attempt.line.offer.provider in self._context.providers]
        decisions = await decide_batch(self._context, self.name, known_here, self._has_finished)
        finished = [attempt for attempt, is_finished in decisions if is_finished]
        if finished:
            await store.mark_launchers_finished(finished)
        return False

    async def _has_finished(self, attempt: Attempt) -> bool:
        """Return True if the launcher has finished.

        A create that this process still has in flight is cancelled first, because another broker has given it up.
        """
        if self._launchers.is_in_flight(attempt.name):
            await self._launchers.stop(attempt)
        return await self._launchers.dead_since(attempt) is not None


class StillLives(GpubrokerError):
    """The launcher is a live process of this host, and may create machines."""


async def confirm_lost(store: Store, attempt: Attempt, provider: Provider | None) -> bool:
    """Record an operator's statement that a launcher creates nothing any more. A later machine is swept as an orphan.

    `provider`: the launcher's provider; None: it is not configured here. Return False if the attempt has changed
    meanwhile. Raises StillLives, StoreUnavailable.
    """
    if provider is not None and await provider.launcher(attempt.launched_by, attempt.name) is Liveness.ALIVE:
        raise StillLives(f"launcher {attempt.launched_by!r} of {attempt.name} runs on this computer; end its process")
    waiting = {launched.id: launched.launched_by for launched in await store.unproven_launches()}
    job = await store.job(attempt.job_id)
    if waiting.get(attempt.id) != attempt.launched_by or job is None:
        return False
    message = (
        f"an operator confirms that launcher {attempt.launched_by!r} of {attempt.name} can create nothing any more"
    )
    await store.apply([Change(events=(event(job, "attempt.launcher_lost", message, attempt=attempt),))])
    await store.mark_launchers_finished([attempt])
    return True
