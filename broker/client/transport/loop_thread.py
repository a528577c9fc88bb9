"""Event loop in a thread of its own, for blocking calls. `Client` and `fit` use it, also inside a running loop."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


class LoopThread:
    """A daemon thread that runs one event loop until `stop`. All threads may call all methods."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.RLock()
        """Orders each `start` before or after the end of the loop. The loop runs callbacks in the order of their
        scheduling. A call scheduled before the end is therefore a task when the open tasks are cancelled.
        """
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="gpubroker-client", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, R]) -> "Future[R]":
        """Start a coroutine. Raises RuntimeError after `stop`."""
        with self._lock:
            if not self._stopping:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the client is closed; make a new one")

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result. Ctrl-C cancels the coroutine.

        Raises RuntimeError after `stop`, and if `stop` cancels the coroutine.
        """
        future = self.start(work)
        try:
            return future.result()
        except CancelledError:
            if self._stopping:
                raise RuntimeError("the client was closed during this call; make a new one") from None
            raise
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, None] | None = None, *, wait_s: float | None = None) -> None:
        """Run `last`, then end the loop and wait for the thread, at most `wait_s` seconds. A second call only waits.

        The garbage collector may call this in the loop's own thread, which cannot wait for itself.
        """
        with self._lock:
            if not self._stopping:
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._stop(last)))
                self._stopping = True
            elif last is not None:
                last.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    async def _stop(self, last: Coroutine[Any, Any, None] | None) -> None:
        try:
            if last is not None:
                await last
        finally:
            if not self._ended.done():
                self._ended.set_result(None)

    def _serve(self) -> None:
        """Run the loop until it is stopped; the open tasks are cancelled, as `asyncio.run` does."""
        loop = self._loop
        try:
            with suppress(SystemExit, KeyboardInterrupt):  # of a call, whose caller gets it
                loop.run_until_complete(self._ended)
            with self._lock:
                self._stopping = True
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
