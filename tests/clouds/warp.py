"""Simulated time, and processes that can be killed, within one event loop.

Every simulated process has a `Life`; after its end the process has no further effect, as after kill -9. Time is the
loop's own and jumps as soon as the loop is idle.
"""

import asyncio
import inspect
import selectors
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
HELD_S = 60.0
"""Wall-clock seconds after which a call counts as hanging, and the simulated clock runs on."""

# ---------------------------------------------------------------------------------------------------------------- time


class _Warp(selectors.DefaultSelector):
    """Selector that waits for the network, but skips waits for the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if found := super().select(HELD_S if self.held > 0 else 0):
            return found
        self.now += timeout
        return []


class WarpLoop(asyncio.SelectorEventLoop):
    """Event loop with simulated time, in which only waiting takes time."""

    def __init__(self) -> None:
        self._warp = _Warp()
        super().__init__(self._warp)

    def time(self) -> float:
        return self._warp.now

    @contextmanager
    def _hold(self) -> Iterator[None]:
        self._warp.held += 1
        try:
            yield
        finally:
            self._warp.held -= 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """End the caller's own hold for a while."""
        self._warp.held -= 1
        try:
            yield
        finally:
            self._warp.held += 1


def held() -> AbstractContextManager[None]:
    """Hold the time inside: for calls of other threads and over sockets, in which no task sleeps."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WarpLoop)
    return loop._hold()


class LoopClock:
    """`ports.Clock` by the loop's time."""

    def now(self) -> datetime:
        return START + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ReleasingClock(LoopClock):
    """Clock of calls that sleep inside `held`, such as the turns of `CallRates`: the time runs while they sleep."""

    async def sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WarpLoop)
        with loop.released():
            await asyncio.sleep(seconds)


# ----------------------------------------------------------------------------------------------------------- processes


class Life:
    """Life of one process."""

    def __init__(self) -> None:
        self.over = False

    def check(self) -> None:
        """End the calling task if its process is dead."""
        if self.over:
            raise asyncio.CancelledError


class Mortal:
    """Port of one process. After the process's death, calls do nothing and answers are never read."""

    def __init__(self, port: Any, life: Life) -> None:
        self._port, self._life = port, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._port, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._life.check()
            answer = await found(*args, **kwargs)
            self._life.check()
            return answer

        return call


class MortalCloud(Mortal):
    """A cloud's native half: its calls are short and go over the network."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            with held():
                return await found(*args, **kwargs)

        return call


class Point:
    """Point at which a process is killed, once."""

    def __init__(self, name: str, kill: Callable[[], None]) -> None:
        self._name, self._kill = name, kill
        self.passed = asyncio.Event()

    def reached(self, name: str, life: Life) -> None:
        """Pass a point. `life`: life of the calling process, which stops here if it was killed."""
        if name == self._name and not self.passed.is_set():
            self._kill()
            self.passed.set()
        life.check()
