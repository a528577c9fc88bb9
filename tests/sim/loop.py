"""A seeded event loop with virtual time: nothing sleeps, what is ready runs in an order drawn from the seed.

Each callback belongs to the process (a broker's incarnation) in whose context it was made. A killed process never runs
again, not even its `finally`; a frozen one runs nothing until it is thawed, and then all that became due meanwhile.
"""

import asyncio
import heapq
import random
from asyncio import base_events, events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
LIVELOCK = 200_000
"""So many callbacks within one virtual instant are a loop without end."""


class Livelock(Exception):
    """Virtual time stands still."""


@dataclass(eq=False)
class Process:
    """One start of a broker. `steps`: callbacks that it has run."""

    id: str
    skew_s: float = 0.0
    """Of its wall clock."""
    dead: bool = False
    frozen: bool = False
    steps: int = 0
    kill_at: int | None = None
    """It dies instead of running this callback."""
    held: list[events.Handle] = field(default_factory=list)
    kept: list[asyncio.Task[Any]] = field(default_factory=list)
    """A killed one's tasks: they are not collected, since that would run their `finally`."""


WHO: ContextVar[Process | None] = ContextVar("process", default=None)


def context_of(process: Process | None) -> Context:
    """In which tasks belong to `process`; None: to the world, which nobody kills."""
    context = copy_context()
    context.run(WHO.set, process)
    return context


class _Future(asyncio.Future[Any]):
    """Its hash is its number, so that the order of a set of them does not depend on addresses."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    number = 0

    def __hash__(self) -> int:
        return self.number


class SimLoop(base_events.BaseEventLoop):
    """`time()` is virtual. `on_kill` is told of a process that has reached its `kill_at`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._now = 0.0
        self._order = random.Random(f"{seed}/order")
        self._numbers = 0
        self._ready: list[events.Handle] = []
        self._scheduled: list[events.TimerHandle]
        self._still = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self.ran = 0
        self.on_kill: Callable[[Process], None] = lambda process: None
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.number = self._number()
        return future

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """There are no threads here: at once."""
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
        if len(self.tasks) > 4096:
            self.tasks = [one for one in self.tasks if not one.done()]
        return task

    def _run_once(self) -> None:
        if not self._ready:
            self._advance()
        place = self._order.randrange(len(self._ready))
        self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
        handle = self._ready.pop()
        if handle.cancelled() or not self._may_run(handle):
            return
        self.ran += 1
        self._still += 1
        if self._still > LIVELOCK:
            raise Livelock(f"at {self._now:.3f}: {handle!r}")
        handle._run()

    def _may_run(self, handle: events.Handle) -> bool:
        process: Process | None = handle._context.get(WHO)  # type: ignore[attr-defined]
        if process is None:
            return True
        if process.dead:
            return False
        if process.frozen:
            process.held.append(handle)
            return False
        process.steps += 1
        if process.kill_at is not None and process.steps >= process.kill_at:
            self.on_kill(process)
            return False
        return True

    def thaw(self, process: Process) -> None:
        process.frozen = False
        self._ready.extend(process.held)
        process.held.clear()

    def _advance(self) -> None:
        """To the next timer that is not cancelled."""
        while True:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                break
        when = timer.when()
        if when > self._now:
            self._now, self._still = when, 0
        self._ready.append(timer)
        while self._scheduled and self._scheduled[0].when() <= self._now:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who had to be woken."""


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
        await asyncio.sleep(seconds)
