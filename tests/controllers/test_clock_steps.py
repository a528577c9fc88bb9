"""A step of the database host's clock during training causes no charge and ends no job."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.fleet import Fleet
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, JobState
from broker.runtime.clock import DatabaseClock
from broker.runtime.control_loop import run_forever
from providers.simulated.config import SimulatedConfig
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import build_fleet
from tests.support.rig.virtual_time import VirtualTimeRig, run_in_virtual_time

HOUR, DAY = 3600.0, 86_400.0
CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 3000, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip


class SetClock(LoopClock):
    """The wall clock of the database's host."""

    ahead_s = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead_s)


class SteppedRig(VirtualTimeRig):
    """A rig whose broker takes its time from the store, as the daemon does."""

    database_clock: DatabaseClock

    def fleet(self, owner: str) -> Fleet:
        return build_fleet(
            owner=owner, store=self.store, blobs=self.blobs, provider=self.provider, clock=self.database_clock,
            offers=self._offers, intervals=self.intervals, limits=self.limits, timeouts=self.timeouts, costs=self.costs,
            is_clock_right=self.database_clock.is_right,
        )  # fmt: skip


async def _story(state: Path, step_s: float, **wanted: Any) -> tuple[SteppedRig, JobId]:
    """Train a job for ten minutes before, during and after a step of the clock, and until it ends."""
    wall = SetClock()
    rig = SteppedRig(store=MemoryStore(wall), config=CONFIG, state=state)
    rig.database_clock = clock = DatabaseClock(rig.store, rig.clock)
    await clock.start()
    await rig.market.step()
    tasks = [asyncio.create_task(rig.fleet("broker").run()), asyncio.create_task(run_forever(clock, clock))]
    try:
        job = await rig.submit(**wanted)
        await rig.train([job])
        for ahead_s in (0.0, step_s, 0.0):
            wall.ahead_s = ahead_s
            before = (await rig.attempts(job))[0].beat
            await rig.clock.sleep(600)
            (attempt,) = await rig.attempts(job)
            assert attempt.state is AttemptState.TRAINING
            assert attempt.beat != before  # it is still observed
            assert attempt.charged_usd <= _at_most(attempt.line.offer.usd_per_hour, rig.clock.monotonic())
            assert bool(clock.step_s) == bool(ahead_s)
        while (stored_job := await rig.store.job(job)) is not None and stored_job.state is JobState.ACTIVE:
            await rig.clock.sleep(10)
        return rig, job
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _at_most(usd_per_hour: Decimal, seconds: float) -> Decimal:
    return usd_per_hour * (Decimal(seconds) + 60) / 3600


@pytest.mark.parametrize("step_s", [HOUR, -HOUR, DAY, -DAY])
def test_a_step_charges_nothing_and_ends_no_job(tmp_path: Path, step_s: float) -> None:
    async def story() -> None:
        rig, job = await _story(tmp_path, step_s, cap_usd="5", max_duration=7200.0)
        stored_job = await rig.store.job(job)
        (attempt,) = await rig.attempts(job)
        assert stored_job is not None
        assert stored_job.state is JobState.SUCCEEDED, stored_job.reason
        seconds = (attempt.ended_at - attempt.create_sent_at).total_seconds()  # type: ignore[operator]
        assert 2500 < seconds < 3600
        assert stored_job.spent_usd == attempt.charged_usd <= _at_most(attempt.line.offer.usd_per_hour, seconds)
        assert not await rig.machines()
        booked = [at for at, entry in rig.store._state.policies.booked if entry.usd]
        assert stored_job.created_at <= min(booked)
        assert max(booked) <= rig.clock.now()

    run_in_virtual_time(story())
