"""The simulation's event loop behaves like asyncio's in virtual time, and kills and freezes processes."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.sim.loop import LIVELOCK, Livelock, Process, SimClock, SimLoop, context_of


def _run(loop: SimLoop, work: Coroutine[Any, Any, Any]) -> Any:
    task = loop.create_task(work)
    task.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    return task.result()


def test_sleeps_end_in_the_order_of_their_times_and_take_none() -> None:
    loop = SimLoop(0)
    clock, readings = SimClock(loop), list[tuple[float, float]]()

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        readings.append((seconds, loop.time()))

    async def all_of_them() -> None:
        await asyncio.gather(*(sleeper(seconds) for seconds in (3600.0, 0.5, 20.0)))

    _run(loop, all_of_them())
    assert readings == [(0.5, 0.5), (20.0, 20.0), (3600.0, 3600.0)]


def test_ready_callbacks_run_in_an_order_drawn_from_the_seed() -> None:
    def order_of(seed: int) -> list[int]:
        loop, order = SimLoop(seed), list[int]()

        async def all_of_them() -> None:
            for number in range(8):
                loop.call_soon(order.append, number)
            await SimClock(loop).sleep(1.0)

        _run(loop, all_of_them())
        return order

    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(5)}) > 1


def test_a_sleeper_can_be_cancelled_and_timed_out() -> None:
    loop = SimLoop(0)
    clock = SimClock(loop)

    async def story() -> float:
        sleeper = asyncio.ensure_future(clock.sleep(1000.0))
        await clock.sleep(1.0)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await clock.sleep(1000.0)
        return loop.time()

    assert _run(loop, story()) == 6.0


def test_a_killed_process_never_runs_again_and_a_frozen_one_continues() -> None:
    loop = SimLoop(0)
    clock, readings = SimClock(loop), list[tuple[str, float]]()
    killed, frozen = Process("killed"), Process("frozen")

    async def work(name: str) -> None:
        try:
            await clock.sleep(10.0)
        finally:
            readings.append((name, loop.time()))

    async def story() -> None:
        tasks = [loop.create_task(work(process.id), context=context_of(process)) for process in (killed, frozen)]
        await clock.sleep(5.0)
        killed.dead = frozen.frozen = True
        await clock.sleep(25.0)
        assert readings == []
        loop.thaw(frozen)
        await clock.sleep(1.0)
        assert readings == [("frozen", 30.0)]
        assert not tasks[0].done()

    _run(loop, story())


def test_a_process_dies_instead_of_running_the_callback_that_was_drawn() -> None:
    loop, killed = SimLoop(0), list[Process]()
    loop.on_kill = killed.append
    process, times = Process("b0.1", kill_at=3), list[float]()

    async def work() -> None:
        while True:
            await SimClock(loop).sleep(1.0)
            times.append(loop.time())

    async def story() -> None:
        loop.create_task(work(), context=context_of(process))
        await SimClock(loop).sleep(2.5)

    _run(loop, story())
    assert killed == [process]
    assert times == [1.0]


def test_a_stopped_virtual_clock_is_noticed() -> None:
    loop = SimLoop(0)

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(Livelock):
        loop.run_forever()
    assert loop.ran == LIVELOCK + 1
