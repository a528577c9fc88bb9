"""A destroy continues while controllers poll its row: one call per machine, whose answer is reported once."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import pytest

from broker.controllers.base.context import ControllerContext
from broker.controllers.termination.destroy_queue import LIMIT_S, Destroys
from broker.domain.errors import Gone, OutcomeUnknown
from broker.domain.job import Handle
from broker.ports import Blobs, Provider, Store
from tests.clouds.warp import LoopClock
from tests.support import build
from tests.support.rig.virtual_time import run_in_virtual_time

HANDLE = Handle(provider="slow", id="i-1", name=build.attempt().name)


@dataclass
class Slow:
    """Cloud whose destroy takes `takes_s` seconds and then raises `says`, if set."""

    takes_s: float = 0.0
    says: Exception | None = None
    asked: list[str] = field(default_factory=list)

    async def destroy(self, handle: Handle) -> None:
        self.asked.append(handle.id)
        await asyncio.sleep(self.takes_s)
        if self.says is not None:
            raise self.says


def destroys(cloud: Slow) -> Destroys:
    context = ControllerContext(
        installation=build.INSTALLATION, owner="test", store=cast(Store, None), blobs=cast(Blobs, None),
        providers={"slow": cast(Provider, cloud)}, clock=LoopClock(),
    )  # fmt: skip
    return Destroys(context)


def test_repeated_requests_join_a_destroy_in_progress() -> None:
    async def story() -> None:
        cloud = Slow(takes_s=45)
        own = destroys(cloud)
        answers = [await own.ask("slow", HANDLE) for _ in range(45)]
        assert (answers, cloud.asked) == ([False] * 44 + [True], ["i-1"])
        await own.ask("slow", HANDLE)
        assert cloud.asked == ["i-1", "i-1"]  # until the machine is absent it is asked for again
        await own.close()

    run_in_virtual_time(story())


def test_a_cancelled_caller_does_not_cancel_the_destroy() -> None:
    async def story() -> None:
        cloud = Slow(takes_s=3)
        own = destroys(cloud)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await own.ask("slow", HANDLE)
        await asyncio.sleep(5)
        assert await own.ask("slow", HANDLE)
        assert cloud.asked == ["i-1"]

    run_in_virtual_time(story())


@pytest.mark.parametrize("says", [Gone("absent"), OutcomeUnknown("503")])
def test_the_clouds_answer_is_returned_to_the_next_caller(says: Exception) -> None:
    async def story() -> None:
        own = destroys(Slow(takes_s=3, says=says))
        assert not await own.ask("slow", HANDLE)
        await asyncio.sleep(5)
        with pytest.raises(type(says)):
            await own.ask("slow", HANDLE)

    run_in_virtual_time(story())


@pytest.mark.parametrize("cloud", [Slow(takes_s=1e9), Slow(says=KeyError("id"))])
def test_a_hanging_or_failing_call_counts_as_unsent(cloud: Slow) -> None:
    async def story() -> None:
        own = destroys(cloud)
        with suppress(OutcomeUnknown):
            await own.ask("slow", HANDLE)
            await asyncio.sleep(LIMIT_S)
        with pytest.raises(OutcomeUnknown):
            await own.ask("slow", HANDLE)

    run_in_virtual_time(story())


def test_answers_about_ended_attempts_are_dropped() -> None:
    async def story() -> None:
        own = destroys(Slow(takes_s=3))
        await own.ask("slow", HANDLE)
        own.keep(set())  # under way, so its answer may still be of use
        assert len(own._calls) == 1
        await asyncio.sleep(5)
        own.keep({build.attempt().id})
        assert len(own._calls) == 1
        own.keep(set())
        assert len(own._calls) == 0

    run_in_virtual_time(story())
