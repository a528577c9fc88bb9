"""A job with a deadline waits for sold-out spot, and buys on demand in time if spot does not come back."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from broker.domain.errors import NoCapacity
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec
from broker.domain.job import Attempt, Handle, Job, JobState, Reason
from broker.domain.offer import Offer
from providers.simulated.config import SimulatedConfig
from tests.clouds.warp import LoopClock
from tests.support.machines import SMOLLM2_135M, WORK
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.simulated_cloud import SimulatedCloud
from tests.support.rig.virtual_time import VirtualTimeRig, run_in_virtual_time

CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 60, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip
DEADLINE_S = 6 * 3600.0


class CloudWithoutSpot(SimulatedCloud):
    """Cloud that refuses spot until a time on its clock."""

    spot_from_s = 0.0

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if offer.spot and self._clock.monotonic() < self.spot_from_s:
            raise NoCapacity("no spot capacity")
        return await super().create(name, offer, boot)


async def run_job(state: Path, spot_from_s: float) -> tuple[Job, Sequence[Attempt], Sequence[str], float]:
    """Return a finished job, its attempts, the reasons that were shown while it waited, and its seconds."""
    rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=CONFIG, state=state, cloud=CloudWithoutSpot)
    async with rig.running():
        rig.cloud.spot_from_s = spot_from_s
        began = rig.clock.now()
        deadline = (began + timedelta(seconds=DEADLINE_S)).isoformat()
        work = replace(WORK, shape=SMOLLM2_135M, steps=100, eval_rows=0)
        job = await rig.submit(work, cap_usd="100", deadline=deadline)
        while (stored_job := await rig.store.job(job)) is not None and stored_job.finished_at is None:
            await rig.clock.sleep(10)
        assert stored_job is not None
        assert stored_job.finished_at is not None
        waits = [event.message for event in await rig.events(job) if event.kind == "job.waiting"]
        return stored_job, await rig.attempts(job), waits, (stored_job.finished_at - began).total_seconds()


@pytest.mark.parametrize("spot_from_s", [3600.0, 1e9], ids=["spot comes back", "spot never comes back"])
def test_a_job_waits_for_spot_and_finishes_in_time(spot_from_s: float, tmp_path: Path) -> None:
    async def story() -> None:
        job, attempts, waits, took_s = await run_job(tmp_path, spot_from_s)
        assert job.state is JobState.SUCCEEDED, job.reason
        assert took_s < DEADLINE_S
        *refused, last = attempts
        assert refused
        assert {attempt.reason for attempt in refused} == {Reason.NO_CAPACITY}
        assert all(attempt.line.offer.spot and not attempt.charged_usd for attempt in refused)
        assert last.line.offer.spot is (spot_from_s < DEADLINE_S)
        assert any(text.startswith("waits for spot until") for text in waits)
        assert len(refused) < DEADLINE_S / 600 * 4
        if last.line.offer.spot:
            assert took_s < spot_from_s + 700
        else:
            assert took_s > DEADLINE_S / 3

    run_in_virtual_time(story())
