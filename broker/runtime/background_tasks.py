"""Work side by side, and background tasks that are never lost: held until done, their errors logged."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> Sequence[T]:
    """What each returns, all at the same time. One alone, which is the rule, takes no task of its own."""
    todo = list(work)
    return [await todo[0]] if len(todo) == 1 else await asyncio.gather(*todo)


class Tasks:
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
        """True as soon as one of them has ended, at once when none runs; False when that takes longer."""
        if not self._running:
            return True
        done, _ = await asyncio.wait(self._running, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def cancel(self) -> None:
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
