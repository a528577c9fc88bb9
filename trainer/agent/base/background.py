"""Endless tasks that run during a block of code."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


@contextlib.asynccontextmanager
async def background(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run endless tasks during the caller's block. A task that fails ends the block with its error."""
    owner = asyncio.current_task()
    assert owner is not None
    failures: list[BaseException] = []

    def watch(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)
            owner.cancel()

    tasks = [asyncio.ensure_future(c) for c in coroutines]
    for task in tasks:
        task.add_done_callback(watch)
    try:
        yield
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
