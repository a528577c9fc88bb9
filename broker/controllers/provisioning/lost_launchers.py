"""Launchers whose end nothing proves: a process on a computer that is lost, or without its state folder.

Only whoever has that computer can say that it creates nothing any more. Until then an attempt stays on its way out, and
its job waits, since a machine may still come.
"""

from broker.controllers.base.events import event
from broker.domain.errors import GpubrokerError
from broker.domain.instance import Liveness
from broker.domain.job import Attempt
from broker.ports import Change, Provider, Store


class StillLives(GpubrokerError):
    """The launcher is a process of this computer, and may create."""


async def vouch(store: Store, attempt: Attempt, provider: Provider | None) -> bool:
    """Somebody says that its launcher can create nothing any more. What comes all the same is an orphan, and swept.

    `provider`: where it launches, as far as it is configured here. False: the attempt has gone on meanwhile.
    Raises StillLives, StoreUnavailable.
    """
    if provider is not None and await provider.launcher(attempt.launched_by, attempt.name) is Liveness.ALIVE:
        raise StillLives(f"launcher {attempt.launched_by!r} of {attempt.name} lives on this computer: end its process")
    waiting = {one.id: one.launched_by for one in await store.unproven_launches()}
    job = await store.job(attempt.job_id)
    if waiting.get(attempt.id) != attempt.launched_by or job is None:
        return False
    words = f"somebody vouches that launcher {attempt.launched_by!r} of {attempt.name} can create nothing any more"
    await store.apply([Change(events=(event(job, "attempt.launcher_lost", words, attempt=attempt),))])
    await store.launchers_through([attempt])
    return True
