"""Threads for computations on users' input, so that no computation blocks the event loop; fair between teams.

A thread cannot be ended, so the input must be bounded too. Past the deadline the caller gets an error, but the
computation continues, and its team's next computation waits until it ends. A long computation is run by
`stoppable`, and ends itself.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from broker.domain.errors import Busy

T = TypeVar("T")
THREADS = 2
"""Number of threads. More would only slow the event loop down, because they share the interpreter's lock."""
DEADLINE_S = 10.0
"""Seconds from the call to the result, including the wait for a thread."""


class ComputationStopped(Exception):
    """Raised within a computation whose result no caller waits for."""


class RunCpu(Protocol):
    """Function that runs one computation. Raises Busy past a deadline, and the computation's own errors."""

    async def __call__(self, compute: Callable[[], T]) -> T: ...


async def run_inline(compute: Callable[[], T]) -> T:
    """Run a computation on the event loop, for tests and offline use."""
    return compute()


class CpuThreads:
    """Pool of threads. Each team runs one computation at a time; the team's further computations wait in order."""

    def __init__(self, threads: int = THREADS, deadline_s: float = DEADLINE_S) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="check")
        self._free = asyncio.Semaphore(threads)
        self._teams: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._deadline_s = deadline_s

    def of_team(self, team: str) -> RunCpu:
        """Return the function that runs computations of `team`."""
        return partial(self._run, team)

    async def stoppable(self, team: str, compute: Callable[[Callable[[], None]], T]) -> T:
        """Run a computation that calls its argument in each of its steps.

        The call raises ComputationStopped once the caller has left, or past the deadline. Raises Busy.
        """
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise ComputationStopped

        try:
            return await self._run(team, lambda: compute(check))
        finally:
            stop.set()

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
                future.add_done_callback(partial(self._release, turn))
                return await asyncio.shield(future)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Busy(f"the checks took more than {self._deadline_s:g} s; try again, or send less") from None

    def _release(self, turn: asyncio.Semaphore, future: "asyncio.Future[T]") -> None:
        """Release the thread and the team's turn. Read the error: asyncio logs an error that no caller reads."""
        if not future.cancelled():
            future.exception()
        self._free.release()
        turn.release()
