"""Blocking calls of several threads: each call returns or raises, also when another thread closes the client."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from broker.client.transport.loop_thread import LoopThread

LIMIT_S = 120.0
"""Seconds after which a call counts as hung."""


async def forever() -> None:
    await asyncio.Event().wait()


def call_until_closed(loop: LoopThread, ready: threading.Barrier, errors: list[str]) -> None:
    ready.wait()
    try:
        while True:
            loop.run(asyncio.sleep(0))
    except RuntimeError as error:
        errors.append(str(error))


def closed_by(loop: LoopThread) -> threading.Thread:
    """Return a thread that closes the loop."""
    closing = threading.Thread(target=loop.stop, daemon=True)
    closing.start()
    return closing


def test_a_call_while_earlier_calls_end_is_refused() -> None:
    loop, ending, may_end = LoopThread(), threading.Event(), threading.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait)

    earlier = loop.start(slow_to_end())
    closing = closed_by(loop)
    assert ending.wait(LIMIT_S)
    try:
        with pytest.raises(RuntimeError, match="closed"):
            loop.start(forever())
    finally:
        may_end.set()
    closing.join(LIMIT_S)
    with pytest.raises(CancelledError):
        earlier.result(LIMIT_S)


def test_a_call_while_the_client_disconnects_is_refused() -> None:
    loop, disconnecting, may_end = LoopThread(), threading.Event(), threading.Event()

    async def disconnect() -> None:
        disconnecting.set()
        await asyncio.to_thread(may_end.wait)

    closing = threading.Thread(target=loop.stop, args=(disconnect(),), daemon=True)
    closing.start()
    assert disconnecting.wait(LIMIT_S)
    try:
        with pytest.raises(RuntimeError, match="closed"):
            loop.start(forever())
    finally:
        may_end.set()
    closing.join(LIMIT_S)


def test_no_call_hangs_when_another_thread_closes() -> None:
    for _ in range(50):
        loop, ready, errors = LoopThread(), threading.Barrier(4), list[str]()
        callers = [threading.Thread(target=call_until_closed, args=(loop, ready, errors), daemon=True) for _ in "abc"]
        for caller in callers:
            caller.start()
        ready.wait()
        loop.stop()
        for caller in callers:
            caller.join(LIMIT_S)
        assert len(errors) == 3
        assert all("closed" in error for error in errors)


def test_a_call_that_ends_the_loop_leaves_no_other_call_waiting() -> None:
    loop = LoopThread()

    async def leave() -> None:
        raise SystemExit(3)

    waiting = loop.start(forever())
    with pytest.raises(SystemExit):
        loop.start(leave()).result(LIMIT_S)
    with pytest.raises(CancelledError):
        waiting.result(LIMIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(forever())
    loop.stop()


def test_a_second_close_runs_nothing() -> None:
    loop, closed = LoopThread(), list[int]()

    async def disconnect(number: int) -> None:
        closed.append(number)

    loop.stop(disconnect(1))
    loop.stop(disconnect(2))
    assert closed == [1]
