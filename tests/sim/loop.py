"""Seeded event loop with virtual time: it never sleeps, and ready callbacks run in an order drawn from the seed.

Each callback belongs to the process (one start of a broker) in whose context it was created. A killed process never
runs again, not even its `finally`. A frozen process runs nothing until it is thawed, and then all due callbacks.
"""

import asyncio
import heapq
import math
import random
from asyncio import base_events, events
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
FEW = 64
"""Finished tasks are dropped when there are more tasks than twice the unfinished ones plus this number."""
LIVELOCK = 200_000
"""Number of callbacks within one virtual instant that counts as an endless loop."""


class Livelock(Exception):
    """Raised when virtual time does not advance."""


@dataclass(eq=False)
class Process:
    """One start of a broker. `steps`: callbacks that it has run."""

    id: str
    skew_s: float = 0.0
    """Skew of the process's wall clock."""
    dead: bool = False
    died_at: float = math.inf
    frozen: bool = False
    steps: int = 0
    kill_at: int | None = None
    """Number of the callback instead of which the process dies; None: it is not killed."""
    held: "list[Due]" = field(default_factory=list)
    kept: list[asyncio.Task[Any]] = field(default_factory=list)
    """Tasks of a killed process, which stay referenced because garbage collection would run their `finally`."""


WHO: ContextVar[Process | None] = ContextVar("process", default=None)


def context_of(process: Process | None) -> Context:
    """Return a context whose tasks belong to `process`; None: to the world, which is never killed."""
    context = copy_context()
    context.run(WHO.set, process)
    return context


class _Future(asyncio.Future[Any]):
    """Future whose hash is its number, so that the order of sets does not depend on addresses."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    number = 0

    def __hash__(self) -> int:
        return self.number


class Due(float):
    """Callback that is ready or waits for its time. It is a float (its time), so that a heap compares it quickly.

    It has only those methods of a handle that `asyncio` calls.
    """

    __slots__ = ("args", "callback", "context")
    args: tuple[Any, ...]
    callback: Callable[..., Any] | None
    context: Context

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return float(self)


class Sleep:
    """Awaitable span of virtual time. The task continues in the same callback, which a future would not allow."""

    __slots__ = ("_asyncio_future_blocking", "_cancelled", "_due", "_loop", "_wake", "_when")
    _wake: Callable[["Sleep"], None]

    def __init__(self, loop: "SimLoop", seconds: float) -> None:
        self._cancelled = False
        self._loop = loop
        self._when = loop._now + seconds

    def __await__(self) -> Generator["Sleep", None, None]:
        self._asyncio_future_blocking = True
        yield self

    def add_done_callback(self, wake: Callable[["Sleep"], None], *, context: Context) -> None:
        self._wake = wake
        self._due = due = Due(self._when)
        due.callback, due.args, due.context = wake, (self,), context
        heapq.heappush(self._loop._later, due)

    def cancel(self, msg: object = None) -> bool:
        if not self._cancelled:
            self._cancelled = True
            self._due.cancel()
            self._loop.call_soon(self._wake, self, context=self._due.context)
        return True

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError


class SimLoop(base_events.BaseEventLoop):
    """A loop with a virtual `time()`. It calls `on_kill` with a process that has reached its `kill_at`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._now = 0.0
        self._draw = random.Random(f"{seed}/order").random
        self._numbers = 0
        self._waiting: list[Due] = []
        self._later: list[Due] = []
        self._most = LIVELOCK
        """Number of callbacks above which the current moment counts as a livelock."""
        self._ended = False
        self.tasks: list[asyncio.Task[Any]] = []
        self._many = FEW
        self.ran = 0
        self.on_kill: Callable[[Process], None] = lambda process: None
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.number = self._number()
        return future

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the function at once, because the simulation has no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def keep_tasks_of(self, process: Process) -> None:
        process.kept = [task for task in self.tasks if not task.done()]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **more: Any
    ) -> asyncio.Task[Any]:
        number = self._number()
        task = _Task.__new__(_Task)
        task.number = number  # before it joins the set of all tasks
        task.__init__(coro, loop=self, name=more.pop("name", f"task-{number}"), **more)  # type: ignore[misc]
        self.tasks.append(task)
        if len(self.tasks) > self._many:
            self.tasks = [one for one in self.tasks if not one.done()]
            self._many = 2 * len(self.tasks) + FEW
        return task

    # --- what is due

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        due = Due(self._now)
        due.callback, due.args, due.context = callback, args, context or copy_context()
        self._waiting.append(due)
        return due

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        due = Due(when)
        due.callback, due.args, due.context = callback, args, context or copy_context()
        heapq.heappush(self._later, due)
        return due

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Due:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_exception_handler(self, context: Any) -> None:
        """Ignore the error; the world reads the controllers' own bugs from their log."""

    def stop(self) -> None:
        self._ended = True

    def run_forever(self) -> None:
        """Run callbacks until `stop`."""
        self._ended = False
        waiting, draw = self._waiting, self._draw
        events._set_running_loop(self)
        try:
            while not self._ended:
                if not waiting:
                    self._advance()
                if len(waiting) > 1:
                    place = int(draw() * len(waiting))
                    waiting[place], waiting[-1] = waiting[-1], waiting[place]
                due = waiting.pop()
                callback, context = due.callback, due.context
                process = context.get(WHO)
                if callback is None or (process is not None and not self._may_run(process, due)):
                    continue
                self.ran += 1
                if self.ran > self._most:
                    raise Livelock(f"at {self._now:.3f}: {callback!r}")
                args, due.args = due.args, ()  # otherwise a sleep and its callback keep each other alive
                try:
                    context.run(callback, *args)
                except Exception as e:
                    self.call_exception_handler({"exception": e})
        finally:
            events._set_running_loop(None)

    def _may_run(self, process: Process, due: Due) -> bool:
        if process.dead:
            return False
        if process.frozen:
            process.held.append(due)
            return False
        process.steps += 1
        if process.kill_at is not None and process.steps >= process.kill_at:
            self.on_kill(process)
            return False
        return True

    def thaw(self, process: Process) -> None:
        process.frozen = False
        self._waiting.extend(process.held)
        process.held.clear()

    def _advance(self) -> None:
        """Advance to the next moment with a callback that is not cancelled."""
        later, waiting, pop = self._later, self._waiting, heapq.heappop
        due = pop(later)
        while due.callback is None:
            due = pop(later)
        if due > self._now:
            self._now, self._most = float(due), self.ran + LIVELOCK
        waiting.append(due)
        now = self._now
        while later and later[0] <= now:
            waiting.append(pop(later))


class SimClock:
    """`ports.Clock` of one process: the wall clock may be wrong, the monotonic one counts from its own zero."""

    def __init__(self, loop: SimLoop, *, skew_s: float = 0.0, zero_s: float = 0.0) -> None:
        self._loop = loop
        self._zero_s = zero_s
        self.skew_s = skew_s

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self._loop.time() + self.skew_s)

    def monotonic(self) -> float:
        return self._zero_s + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await Sleep(self._loop, seconds)
