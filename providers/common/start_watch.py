"""Whether launched machines come to run their task: heard in the background, so that no listing waits for it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set

from broker.domain.errors import ProviderError
from broker.domain.ids import InstanceName

LOOK_S = 5.0
"""Between two looks at a machine."""
AT_ONCE = 8
"""Looks; each is a process. A daemon that is restarted looks at all its machines."""

log = logging.getLogger(__name__)


class StartWatch:
    """Looks at every machine until it is known to run its task or to have failed."""

    def __init__(self, started: Callable[[InstanceName], Awaitable[bool | str]]) -> None:
        """`started`: see `providers.common.cloud.Launcher`."""
        self._started = started
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[InstanceName, asyncio.Task[str | None]] = {}

    def follow(self, names: Set[InstanceName]) -> None:
        """Begins with those that are new, e.g. of a former daemon, and forgets those that are gone."""
        for name in self._tasks.keys() - names:
            self._tasks.pop(name).cancel()
        for name in names - self._tasks.keys():
            self._tasks[name] = asyncio.create_task(self._until_known(name))

    def fault(self, name: InstanceName) -> str | None:
        """Why it will never run its task; None: nothing of that kind has been heard."""
        task = self._tasks.get(name)
        return task.result() if task is not None and task.done() and not task.cancelled() else None

    def leave(self, name: InstanceName) -> None:
        """It is being destroyed: no more looks, however long it is listed yet."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    async def _until_known(self, name: InstanceName) -> str | None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                async with self._slots:
                    said = await self._started(name)
            except ProviderError:
                continue
            except Exception:
                log.exception("looking whether %s runs its task failed; it is not looked at again", name)
                return None
            if said:
                return said if isinstance(said, str) else None

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
