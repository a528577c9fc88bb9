"""Waiters for hints. A hint only shortens a wait; whoever wakes reads the rows again."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine


class Hints:
    """Topics that coroutines of this process wait for. `sleep` measures the time-outs, in seconds."""

    def __init__(self, sleep: Callable[[float], Coroutine[None, None, None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def hint(self, topic: str) -> None:
        """Wakes those who wait for `topic` now."""
        for waiter in self._waiters.pop(topic, ()):
            if not waiter.done():
                waiter.set_result(None)

    def hint_all(self) -> None:
        """Wakes everybody: hints may have been missed."""
        for topic in list(self._waiters):
            self.hint(topic)

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """True when `topic` was hinted at within the time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[topic].add(waiter)
        timer = asyncio.ensure_future(self._sleep(timeout_s))
        try:
            await asyncio.wait((waiter, timer), return_when=asyncio.FIRST_COMPLETED)
            return waiter.done()
        finally:
            timer.cancel()
            waiter.cancel()
            if (left := self._waiters.get(topic)) is not None:
                left.discard(waiter)
                if not left:
                    del self._waiters[topic]
