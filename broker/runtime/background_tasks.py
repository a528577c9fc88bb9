"""Concurrent coroutines, background tasks whose errors are logged, and actions that outlive a cancelled caller."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from broker.domain.errors import Busy, GpubrokerError

log = logging.getLogger(__name__)
T = TypeVar("T")
ACTIONS_AT_ONCE = 256
"""Maximum number of actions that run at once; a caller that leaves frees its request slot, but not its action."""
CLOSE_S = 10.0
"""Seconds for which a stopping daemon waits for running actions."""


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> Sequence[T]:
    """Return the results of coroutines that run concurrently. A single coroutine is awaited without a task."""
    todo = list(work)
    return [await todo[0]] if len(todo) == 1 else await asyncio.gather(*todo)


class Tasks:
    """Set of background tasks; it references each task until the task is done, so that none is garbage-collected."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s", type(error).__name__, error, exc_info=error)

    async def one_done(self, within_s: float) -> bool:
        """Return True as soon as a task has ended, or at once if none runs; False after `within_s` seconds."""
        if not self._running:
            return True
        finished, _ = await asyncio.wait(self._running, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(finished)

    async def cancel(self) -> None:
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class UninterruptedActions:
    """Runs each action to its end, even if its caller is cancelled, and references each action until its end.

    An HTTP request is cancelled when its client disconnects, which may be between two steps of an action.
    """

    def __init__(self, max_running: int = ACTIONS_AT_ONCE, close_s: float = CLOSE_S) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._max_running, self._close_s = max_running, close_s

    async def run(self, action: Coroutine[Any, Any, T]) -> T:
        """Return the action's result. Raises Busy before the action starts if too many run."""
        if len(self._running) >= self._max_running:
            action.close()
            raise Busy(f"{self._max_running} actions are running already; try again")
        task = asyncio.create_task(action)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_fault)
            raise

    async def close(self) -> None:
        """Wait for the running actions, and cancel the actions that take too long."""
        if self._running:
            _, unfinished = await asyncio.wait(self._running, timeout=self._close_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)


def _log_fault(task: asyncio.Task[Any]) -> None:
    """Log the error of an action whose caller has left. Refusals and broken connections are answers, not faults."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if not isinstance(error, (GpubrokerError, ConnectionError)):
        log.error("an action whose caller had left failed", exc_info=error)
