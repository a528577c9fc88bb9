"""A broker that stays away: its machines save and stop, and the next broker resumes the jobs without using up a
retry.
"""

import asyncio
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.billing.metering import Billing
from broker.domain.errors import OutcomeUnknown
from broker.domain.ids import JobId
from broker.domain.instance import SELF_STOP_S, Observed
from broker.domain.job import JobState, Reason, Signal
from providers.simulated.config import SimulatedConfig
from providers.simulated.virtual_backend import VirtualBackend, _Instance
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.virtual_time import WORTH, VirtualTimeRig, run_in_virtual_time
from trainer.agent.dead_man_switch import DeadMan
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, Outcome

DEADMAN_S, JOBS = 300.0, 5


class Agents(VirtualBackend):
    """Virtual machines whose agents have the real dead-man's switch."""

    switches: dict[str, DeadMan]

    async def _obey(self, instance: _Instance, spec: AttemptSpec, step: int) -> None:
        switch = self.switches.setdefault(instance.attempt, DeadMan(spec.limits.deadman_s))
        switch.observe(await self._blobs.get(keys.BROKER_LEASE), self._clock.monotonic())
        if switch.expired:
            await self._save(instance, spec, step)
            await self._finish(instance, Outcome.DEADMAN, step, "the broker's lease did not change")
            return
        await super()._obey(instance, spec, step)


CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 1500, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip


async def left_alone(state: Path, count: int, **wanted: Any) -> tuple[VirtualTimeRig, list[JobId], float]:
    """Start jobs, end the broker, and wait until the machines have saved and stopped. Return (rig, jobs, seconds that
    their machines ran without a broker).
    """
    rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=CONFIG, state=state)
    rig.limits = rig.limits.model_copy(update={"deadman_s": DEADMAN_S})
    agents = Agents(rig.blobs, rig.clock, CONFIG.virtual)
    agents.switches = {}
    rig.body = rig.provider._backend = agents
    await rig.market.step()
    first = asyncio.create_task(rig.fleet("first").run())
    jobs = [await rig.submit(**wanted) for _ in range(count)]
    await rig.train(jobs)
    await rig.clock.sleep(200)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gone_at = rig.clock.monotonic()
    while await rig.machines() and rig.clock.monotonic() < gone_at + 10_000:
        await rig.clock.sleep(1)
    return rig, jobs, rig.clock.monotonic() - gone_at


async def all_done(rig: VirtualTimeRig, jobs: Sequence[JobId]) -> None:
    until = rig.clock.monotonic() + 2500
    while rig.clock.monotonic() < until and not all([await _done(rig, job) for job in jobs]):
        await rig.clock.sleep(10)


def test_every_job_is_saved_and_continues_when_the_broker_comes_back(tmp_path: Path) -> None:
    async def story() -> None:
        rig, jobs, alone_s = await left_alone(tmp_path, JOBS, **WORTH)
        assert alone_s <= DEADMAN_S + rig.intervals.deadman_s + 10
        await rig.clock.sleep(3600)
        async with rig.running("second"):
            await all_done(rig, jobs)
            for job in jobs:
                stored_job = await rig.store.job(job)
                stopped, resumed = await rig.attempts(job)
                assert stored_job is not None
                assert (stored_job.state, stored_job.retries_used) == (JobState.SUCCEEDED, 0)
                assert stopped.reason is Reason.DEADMAN
                assert stopped.final is not None
                assert stopped.final.step > 0
                assert resumed.final is not None
                assert resumed.final.resumed_from == stopped.final.step

    run_in_virtual_time(story())


@pytest.mark.parametrize("billed_first", [False, True])
def test_long_broker_absence_is_charged_up_to_the_self_stop_only(tmp_path: Path, billed_first: bool) -> None:
    """The charge does not use up the cap, although the price of 60 hours is above it, whichever controller polls
    first.
    """

    async def story() -> None:
        rig, (job,), _ = await left_alone(tmp_path, 1, **WORTH | {"cap_usd": "0.50"})
        (alone,) = await rig.attempts(job)
        await rig.clock.sleep(60 * 3600)
        if billed_first:
            (billing,) = (
                controller for controller in rig.fleet("second").controllers if isinstance(controller, Billing)
            )
            for _ in range(2):  # a single listing says nothing
                await billing._inventory.refresh("simulated", max_age_s=0.0)
            await billing.step()
        async with rig.running("second"):
            await all_done(rig, [job])
        stopped, _ = await rig.attempts(job)
        rate = alone.line.offer.usd_per_hour / 3600
        assert rate * 60 * 3600 > Decimal("0.50")
        longest_s = DEADMAN_S + rig.limits.drain_s + SELF_STOP_S + 60
        assert await _done(rig, job)
        assert stopped.charged_usd <= alone.charged_usd + rate * Decimal(longest_s)

    run_in_virtual_time(story())


async def _done(rig: VirtualTimeRig, job: JobId) -> bool:
    stored_job = await rig.store.job(job)
    return stored_job is not None and stored_job.state is JobState.SUCCEEDED


def test_a_broker_frozen_for_hours_lists_machines_before_it_charges(tmp_path: Path) -> None:
    """The broker's latest listing is as old as the freeze. Like a starting broker it lists first, because machines may
    have ended since.
    """

    async def story() -> None:
        rig, awake = VirtualTimeRig(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path), asyncio.Event()
        rig.limits = rig.limits.model_copy(update={"deadman_s": DEADMAN_S})
        rig.body = rig.provider._backend = Agents(rig.blobs, rig.clock, CONFIG.virtual)
        rig.body.switches = {}
        listing = rig.provider.list

        async def slow() -> Sequence[Observed]:
            await rig.clock.sleep(0.3)
            return await listing()

        rig.provider.list = slow  # type: ignore[method-assign]
        await rig.market.step()
        fleet = rig.fleet("first")
        for controller in fleet.controllers:
            freeze(controller, awake)
        awake.set()
        running = asyncio.create_task(fleet.run())
        job = await rig.submit(**WORTH)
        (alone,) = await rig.train([job])
        awake.clear()
        await rig.clock.sleep(8 * 3600)
        awake.set()
        await all_done(rig, [job])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        stopped, *_ = await rig.attempts(job)
        rate = alone.line.offer.usd_per_hour / 3600
        longest_s = DEADMAN_S + rig.limits.drain_s + SELF_STOP_S + 100
        assert stopped.charged_usd <= alone.charged_usd + rate * Decimal(longest_s)

    run_in_virtual_time(story())


def freeze(controller: Any, awake: asyncio.Event) -> None:
    """Freeze the daemon: it does nothing until it is thawed."""
    step = controller.step

    async def when_awake() -> bool:
        await awake.wait()
        return bool(await step())

    controller.step = when_awake


def test_cap_holds_when_listings_are_empty_after_a_restart(tmp_path: Path) -> None:
    """The blob store was unreachable as well, so that the agent waited and continues to train."""

    async def down() -> Sequence[Observed]:
        raise OutcomeUnknown("429")

    async def story() -> None:
        config = CONFIG.model_copy(update={"virtual": CONFIG.virtual.model_copy(update={"run_s": 1e6})})
        rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=config, state=tmp_path)
        await rig.market.step()
        first = asyncio.create_task(rig.fleet("first").run())
        job = await rig.submit(**WORTH | {"cap_usd": "0.06"})
        (before,) = await rig.train([job])
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await rig.clock.sleep(6000)
        rig.provider.list = down  # type: ignore[method-assign]
        cap_s = 0.06 / float(before.line.offer.usd_per_hour) * 3600
        async with rig.running("second"):
            await rig.clock.sleep(cap_s - 6000)
            (attempt,) = await rig.attempts(job)
            assert attempt.signal is Signal.CAP
            assert attempt.charged_usd > Decimal("0.05")

    run_in_virtual_time(story())
