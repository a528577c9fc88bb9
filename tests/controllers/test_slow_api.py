"""Destroys of many machines at a cloud that allows one call a second."""

from pathlib import Path

from broker.domain.job import AttemptState
from broker.runtime.provider_gate import RateLimitedProvider
from providers.simulated.config import SimulatedConfig
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.simulated_cloud import CloudFaults
from tests.support.rig.virtual_time import WORTH, VirtualTimeRig, run_in_virtual_time

MACHINES = 30
CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 1e6, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip


def test_destroys_that_wait_for_their_turn_keep_it(tmp_path: Path) -> None:
    """Every other call is a listing. A destroy that waits keeps its place when its row's time is over."""

    async def story() -> None:
        faults = CloudFaults(caps={"calls_per_s": 1.0, "list_lag_s": 15.0})
        rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path, faults=faults)
        jobs = [await rig.submit(**WORTH) for _ in range(MACHINES)]
        rig.provider = RateLimitedProvider(rig.provider, rig.clock)  # type: ignore[assignment]
        async with rig.running():
            await rig.train(jobs)
            stopped = rig.clock.monotonic()
            for job in jobs:
                await rig.stop(job)
            while await rig.machines():
                await rig.clock.sleep(1)
            assert rig.clock.monotonic() - stopped <= 2 * MACHINES + 20
            await rig.clock.sleep(120)
            ends = [await rig.attempts(job) for job in jobs]
        assert [attempt.state for (attempt,) in ends] == [AttemptState.ENDED] * MACHINES
        assert [attempt.destroy_failures for (attempt,) in ends] == [0] * MACHINES

    run_in_virtual_time(story())
