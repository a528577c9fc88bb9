"""Computations on users' input: off the event loop, one at a time for each team, with a deadline."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from broker.domain.errors import Busy
from broker.runtime.cpu_threads import ComputationStopped, CpuThreads

TIMEOUT_S = 60.0


async def test_a_computation_past_the_deadline_is_answered_and_keeps_its_place() -> None:
    """The event loop runs meanwhile, and a second team is served although the first team's thread is occupied."""
    threads, release = CpuThreads(deadline_s=0.05), threading.Event()
    try:
        with pytest.raises(Busy, match="try again"):
            await threads.of_team("slow")(lambda: release.wait(TIMEOUT_S))
        assert await threads.of_team("quick")(lambda: 4) == 4
        with pytest.raises(Busy):
            await threads.of_team("slow")(lambda: 4)
    finally:
        release.set()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                assert await threads.of_team("slow")(lambda: 5) == 5
                return
            except Busy:
                pass  # the released thread has not ended yet


async def test_a_team_has_one_computation_at_a_time() -> None:
    threads, running, most = CpuThreads(threads=4), [0], [0]

    def compute() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.001)
        running[0] -= 1

    await asyncio.gather(*(threads.of_team("one")(compute) for _ in range(8)))
    assert most == [1]


async def test_an_error_of_the_computation_reaches_the_caller() -> None:
    def fail() -> None:
        raise TimeoutError("of the computation")

    with pytest.raises(TimeoutError, match="of the computation"):
        await CpuThreads().of_team("one")(fail)


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_computation_without_a_caller_stops_itself(is_left: bool) -> None:
    """The caller leaves, or its deadline is over; then the only thread is free for another team."""
    threads, entered, stopped = CpuThreads(threads=1, deadline_s=TIMEOUT_S), threading.Event(), threading.Event()
    if not is_left:
        threads = CpuThreads(threads=1, deadline_s=0.5)

    def compute(check: Callable[[], None]) -> None:
        try:
            while True:
                check()
                entered.set()
        except ComputationStopped:
            stopped.set()
            raise

    caller = asyncio.create_task(threads.stoppable("slow", compute))
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    if is_left:
        caller.cancel()
    with pytest.raises(asyncio.CancelledError if is_left else Busy):
        await caller
    assert await asyncio.to_thread(stopped.wait, TIMEOUT_S)
    assert await threads.stoppable("other", lambda _: 4) == 4
