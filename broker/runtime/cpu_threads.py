"""Threads for computations on users' input, so that none holds the event loop; fair between teams.

A thread cannot be ended, so the input must be bounded too. A computation past the deadline is answered with an error,
and keeps its team's place until it ends.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from broker.domain.errors import Busy

T = TypeVar("T")
THREADS = 2
"""Computations at once. More would only slow the event loop down, because they share the interpreter's lock."""
DEADLINE_S = 10.0
"""Seconds from the request for a computation to its result, the wait for a thread included."""


class RunCpu(Protocol):
    """Runs one computation. Raises Busy past a deadline, and the computation's own errors."""

    async def __call__(self, compute: Callable[[], T]) -> T: ...


async def run_inline(compute: Callable[[], T]) -> T:
    """Run a computation on the event loop, for tests and offline use."""
    return compute()


class CpuThreads:
    """A pool of threads. A team has one computation at a time; its others wait, in order."""

    def __init__(self, threads: int = THREADS, deadline_s: float = DEADLINE_S) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="check")
        self._free = asyncio.Semaphore(threads)
        self._teams: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._deadline_s = deadline_s

    def of_team(self, team: str) -> RunCpu:
        """Return the function that runs computations in the team's place."""
        return partial(self._run, team)

    async def _run(self, team: str, compute: Callable[[], T]) -> T:
        turn = self._teams.setdefault(team, asyncio.Semaphore(1))
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                await turn.acquire()
                try:
                    await self._free.acquire()
                except BaseException:
                    turn.release()
                    raise
                future = asyncio.get_running_loop().run_in_executor(self._executor, compute)
                future.add_done_callback(partial(self._ended, turn))
                return await asyncio.shield(future)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Busy(f"the checks took more than {self._deadline_s:g} s; try again, or send less") from None

    def _ended(self, turn: asyncio.Semaphore, done: "asyncio.Future[T]") -> None:
        """Free the places of a computation. Its error is read, because the caller may have left."""
        if not done.cancelled():
            done.exception()
        self._free.release()
        turn.release()
