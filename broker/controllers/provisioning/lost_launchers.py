"""Launchers whose end cannot be proven: processes of a host that is lost, or that lost its state folder.

Only an operator can confirm that such a launcher creates nothing any more. Until then the attempt stays terminating and
its job waits, since a machine may still appear.
"""

from broker.controllers.base.events import event
from broker.domain.errors import GpubrokerError
from broker.domain.instance import Liveness
from broker.domain.job import Attempt
from broker.ports import Change, Provider, Store


class StillLives(GpubrokerError):
    """The launcher is a live process of this host, and may create machines."""


async def vouch(store: Store, attempt: Attempt, provider: Provider | None) -> bool:
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
    await store.launchers_through([attempt])
    return True
