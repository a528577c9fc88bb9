"""Background checks that launched machines start their task. They run apart from listings, which must be fast."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set

from broker.domain.errors import ProviderError
from broker.domain.ids import InstanceName

POLL_S = 5.0
"""Seconds between two checks of a machine."""
AT_ONCE = 8
"""Largest number of concurrent checks. Each check is a process, and a restarted daemon checks all its machines."""

log = logging.getLogger(__name__)


class StartWatch:
    """Checks every machine until its task runs or has failed."""

    def __init__(self, started: Callable[[InstanceName], Awaitable[bool | str]]) -> None:
        """`started`: see `providers.common.cloud.Launcher`."""
        self._started = started
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[InstanceName, asyncio.Task[str | None]] = {}

    def follow(self, names: Set[InstanceName]) -> None:
        """Start checks of new machines, and stop checks of machines that no longer exist."""
        for name in self._tasks.keys() - names:
            self._tasks.pop(name).cancel()
        for name in names - self._tasks.keys():
            self._tasks[name] = asyncio.create_task(self._until_known(name))

    def fault(self, name: InstanceName) -> str | None:
        """Return why a machine will never run its task, or None if no failure is reported."""
        task = self._tasks.get(name)
        return task.result() if task is not None and task.done() and not task.cancelled() else None

    def leave(self, name: InstanceName) -> None:
        """Stop the checks of a machine that is being destroyed, even while it is still listed."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    async def _until_known(self, name: InstanceName) -> str | None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                async with self._slots:
                    answer = await self._started(name)
            except ProviderError:
                continue
            except Exception:
                log.exception("the check whether %s runs its task failed; the machine is not checked again", name)
                return None
            if answer:
                return answer if isinstance(answer, str) else None

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
