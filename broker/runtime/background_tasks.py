"""Concurrent coroutines, and background tasks whose errors are logged."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s", type(error).__name__, error, exc_info=error)

    async def one_done(self, within_s: float) -> bool:
        """Return True as soon as a task has ended, or at once if none runs; False after `within_s` seconds."""
        if not self._running:
            return True
        done, _ = await asyncio.wait(self._running, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def cancel(self) -> None:
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
