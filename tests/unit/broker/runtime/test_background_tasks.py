"""Actions of several steps run to their end, even if their caller is cancelled."""

import asyncio
import logging

import pytest

from broker.domain.errors import Busy, InvalidInput, Problem
from broker.runtime.background_tasks import UninterruptedActions


async def left(actions: UninterruptedActions, steps: list[int], release: asyncio.Event) -> None:
    """Start an action of three steps, and cancel its caller within the first step."""
    entered = asyncio.Event()

    async def act() -> None:
        for step in range(3):
            entered.set()
            await release.wait()
            steps.append(step)

    caller = asyncio.create_task(actions.run(act()))
    await entered.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_an_action_ends_after_its_caller_has_left() -> None:
    """A stopping daemon waits for the action."""
    actions, steps, release = UninterruptedActions(), list[int](), asyncio.Event()
    await left(actions, steps, release)
    closing = asyncio.create_task(actions.close())
    release.set()
    await closing
    assert steps == [0, 1, 2]


async def test_a_hanging_action_does_not_delay_the_stop() -> None:
    actions, steps = UninterruptedActions(close_s=0.0), list[int]()
    await left(actions, steps, asyncio.Event())
    await actions.close()
    assert steps == []
    assert await actions.run(asyncio.sleep(0, "free")) == "free"


async def test_cancelled_callers_cannot_accumulate_actions() -> None:
    actions, steps, release = UninterruptedActions(max_running=2), list[int](), asyncio.Event()
    for _ in range(2):
        await left(actions, steps, release)
    with pytest.raises(Busy, match="try again"):
        await actions.run(asyncio.sleep(0))
    release.set()
    await actions.close()
    await actions.run(asyncio.sleep(0))


@pytest.mark.parametrize("fault", [ValueError("a fault"), InvalidInput(Problem(field="x", message="no job"))])
async def test_a_fault_of_an_action_is_logged_and_a_refusal_is_not(
    caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    actions, entered, release = UninterruptedActions(), asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        entered.set()
        await release.wait()
        raise fault

    caller = asyncio.create_task(actions.run(fail()))
    await entered.wait()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    release.set()
    with caplog.at_level(logging.ERROR):
        await actions.close()
        await asyncio.sleep(0)
    assert ("a fault" in caplog.text) == isinstance(fault, ValueError)
    with pytest.raises(type(fault)):
        await actions.run(fail())
