"""One of several machines stops, vanishes or finishes while the first one continues."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from broker.domain.ids import JobId
from broker.domain.instance import InstanceState
from broker.domain.job import AttemptState, JobState, Reason
from broker.lifecycle.liveness import LivenessTimeouts
from tests.support.rig.broker_rig import ENDLESS, BrokerRig, RigBuilder
from tests.support.rig.launcher_cloud import LauncherCloud, cloud_of, name_of
from trainer.contract.documents import Limits

HASTY = LivenessTimeouts(beat_s=0.1, stopped_s=0.3, lost_s=0.5)
LIMITS = Limits(heartbeat_s=HASTY.beat_s, drain_s=2)
STOPPED = {"state": InstanceState.STOPPED}


@pytest.fixture
def rig(build_rig: RigBuilder) -> BrokerRig:
    built = build_rig(LauncherCloud, virtual=ENDLESS)
    built.timeouts, built.limits = HASTY, LIMITS
    cloud_of(built).setup_allowed.set()
    return built


async def _trains(rig: BrokerRig) -> JobId:
    job = await rig.submit(resources={"nodes": 2})

    async def trains() -> bool:
        return any(a.state is AttemptState.TRAINING for a in await rig.attempts(job))

    await rig.eventually(trains)
    return job


@asynccontextmanager
async def _beating(rig: BrokerRig, job: JobId) -> AsyncIterator[None]:
    async def beats() -> None:
        while True:
            await cloud_of(rig).beat(name_of(job), 1)
            await rig.clock.sleep(HASTY.beat_s / 2)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _listed(rig: BrokerRig, times: int) -> None:
    """Wait for `times` more listings, and for longer than the time without heartbeats after which a machine counts as
    stopped.
    """
    cloud, clock = cloud_of(rig), rig.clock
    enough, late = cloud.listings + times, clock.monotonic() + 3 * HASTY.stopped_after_s
    await rig.eventually(lambda: _is(cloud.listings >= enough and clock.monotonic() >= late))


async def _is(true: bool) -> bool:
    return true


async def _ended(rig: BrokerRig, job: JobId) -> bool:
    return (await rig.attempts(job))[0].state is AttemptState.ENDED


async def test_a_stopped_second_machine_ends_the_attempt(rig: BrokerRig) -> None:
    async with rig.running():
        job = await _trains(rig)
        async with _beating(rig, job):
            await _listed(rig, 3)
            cloud_of(rig).faults.shown[f"{name_of(job)}-1"] = STOPPED
            await _listed(rig, 30)
            (attempt,) = await rig.attempts(job)
            assert attempt.state is AttemptState.TRAINING, "its own beats say that it runs"
        await rig.eventually(lambda: _ended(rig, job))
        assert (await rig.attempts(job))[0].reason is Reason.PREEMPTED


@pytest.mark.parametrize("shown", [STOPPED, {"state": InstanceState.GONE}, None])
async def test_a_finished_machine_may_end_while_the_first_delivers_results(
    rig: BrokerRig, shown: dict[str, object] | None
) -> None:
    cloud = cloud_of(rig)
    async with rig.running():
        job = await _trains(rig)
        mate = f"{name_of(job)}-1"
        await cloud.beat(name_of(job), 1, "done")
        if shown is None:
            del cloud.extra[mate]
        else:
            cloud.faults.shown[mate] = shown
        await _listed(rig, 60)
        await rig.completed(job)
        await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
        assert attempt.reason is Reason.COMPLETED
        assert await cloud.list() == []


async def test_a_silent_first_machine_is_noticed_after_the_others_finished(rig: BrokerRig) -> None:
    cloud = cloud_of(rig)
    async with rig.running():
        job = await _trains(rig)
        await cloud.beat(name_of(job), 1, "done")
        await cloud.evict(name_of(job))
        await rig.eventually(lambda: _ended(rig, job))
        assert (await rig.attempts(job))[0].reason is Reason.PREEMPTED
