"""Event loop in a thread of its own, for blocking calls. `Client` and `fit` use it, also inside a running loop."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class LoopThread:
    """A daemon thread that runs one event loop until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="gpubroker-client", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, R]) -> "Future[R]":
        """Start a coroutine. Raises RuntimeError after `stop`."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the client is closed; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result. Ctrl-C cancels the coroutine. Raises RuntimeError after `stop`."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, None] | None = None, *, wait_s: float | None = None) -> None:
        """Run `last`, then end the loop and wait for the thread, at most `wait_s` seconds. A second call does nothing.

        The garbage collector may call this in the loop's own thread, which cannot wait for itself.
        """
        if self._loop.is_closed():
            if last is not None:
                last.close()
            return
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end(last)))
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        try:
            if last is not None:
                await last
        finally:
            self._loop.stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped; the open tasks are cancelled, as `asyncio.run` does."""
    try:
        loop.run_forever()
        loop.run_until_complete(_cancelled())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


async def _cancelled() -> None:
    """Cancel all other tasks of the loop, and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
