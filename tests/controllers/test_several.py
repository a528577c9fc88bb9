"""One machine of several stops, goes or is done, while the first one goes on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from broker.domain.ids import JobId
from broker.domain.instance import InstanceState
from broker.domain.job import AttemptState, JobState, Reason
from broker.lifecycle.liveness import LivenessTimeouts
from tests.controllers.house import ENDLESS, House
from tests.controllers.rented import Rented, cloud_of, name_of
from trainer.contract.documents import Limits

HASTY = LivenessTimeouts(beat_s=0.1, stopped_s=0.3)
LIMITS = Limits(heartbeat_s=HASTY.beat_s, drain_s=2)
STOPPED = {"state": InstanceState.STOPPED}


@pytest.fixture
def broker(house: Callable[..., House]) -> House:
    built = house(Rented, virtual=ENDLESS)
    built.timeouts, built.limits = HASTY, LIMITS
    cloud_of(built).set_up.set()
    return built


async def _trains(broker: House) -> JobId:
    job = await broker.submit(resources={"nodes": 2})

    async def trains() -> bool:
        return any(a.state is AttemptState.TRAINING for a in await broker.attempts(job))

    await broker.eventually(trains)
    return job


@asynccontextmanager
async def _beating(broker: House, job: JobId) -> AsyncIterator[None]:
    async def beats() -> None:
        while True:
            await cloud_of(broker).beat(name_of(job), 1)
            await broker.clock.sleep(HASTY.beat_s / 2)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _listed(broker: House, times: int) -> None:
    """So often, and for longer than a beat may be missing."""
    cloud, clock = cloud_of(broker), broker.clock
    enough, late = cloud.listings + times, clock.monotonic() + 3 * HASTY.stopped_after_s
    await broker.eventually(lambda: _is(cloud.listings >= enough and clock.monotonic() >= late))


async def _is(true: bool) -> bool:
    return true


async def _ended(broker: House, job: JobId) -> bool:
    return (await broker.attempts(job))[0].state is AttemptState.ENDED


async def test_one_that_is_stopped_ends_the_attempt_though_the_first_beats_on(broker: House) -> None:
    async with broker.running():
        job = await _trains(broker)
        async with _beating(broker, job):
            await _listed(broker, 3)
            cloud_of(broker).shown[f"{name_of(job)}-1"] = STOPPED
            await _listed(broker, 30)
            (attempt,) = await broker.attempts(job)
            assert attempt.state is AttemptState.TRAINING, "its own beats say that it runs"
        await broker.eventually(lambda: _ended(broker, job))
        assert (await broker.attempts(job))[0].reason is Reason.PREEMPTED


@pytest.mark.parametrize("shown", [STOPPED, {"state": InstanceState.GONE}, None])
async def test_one_that_is_done_may_end_itself_while_the_first_delivers(
    broker: House, shown: dict[str, object] | None
) -> None:
    cloud = cloud_of(broker)
    async with broker.running():
        job = await _trains(broker)
        mate = f"{name_of(job)}-1"
        await cloud.beat(name_of(job), 1, "done")
        if shown is None:
            del cloud.bare[mate]
        else:
            cloud.shown[mate] = shown
        await _listed(broker, 60)
        await broker.completed(job)
        await broker.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await broker.attempts(job)
        assert attempt.reason is Reason.COMPLETED
        assert await cloud.list() == []


async def test_the_first_one_is_missed_though_the_others_are_done(broker: House) -> None:
    cloud = cloud_of(broker)
    async with broker.running():
        job = await _trains(broker)
        await cloud.beat(name_of(job), 1, "done")
        await cloud.evict(name_of(job))
        await broker.eventually(lambda: _ended(broker, job))
        assert (await broker.attempts(job))[0].reason is Reason.PREEMPTED
