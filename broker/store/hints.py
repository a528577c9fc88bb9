"""Hints that end a wait early. A hint carries no data: the waiter reads the rows again."""

import asyncio
import functools
from collections import defaultdict


class Hints:
    """Topics that coroutines of this process wait for."""

    def __init__(self) -> None:
        self._waiters: defaultdict[str, set[asyncio.Future[bool]]] = defaultdict(set)

    def hint(self, topic: str) -> None:
        """Wake the coroutines that wait for `topic`."""
        for waiter in self._waiters.pop(topic, ()):
            _wake(waiter, hinted=True)

    def hint_all(self) -> None:
        """Wake all waiters, because hints may have been missed."""
        for topic in list(self._waiters):
            self.hint(topic)

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """Return True if `topic` is hinted within the timeout."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[topic].add(waiter)
        timer = loop.call_later(timeout_s, functools.partial(_wake, waiter, hinted=False))
        try:
            return await waiter
        finally:
            timer.cancel()
            if (left := self._waiters.get(topic)) is not None:
                left.discard(waiter)
                if not left:
                    del self._waiters[topic]


def _wake(waiter: asyncio.Future[bool], *, hinted: bool) -> None:
    if not waiter.done():
        waiter.set_result(hinted)
