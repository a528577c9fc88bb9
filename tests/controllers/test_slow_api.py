"""Many machines at a cloud that takes a call a second: none waits longer for its end than those calls take."""

from dataclasses import replace
from pathlib import Path

from broker.domain.instance import Caps
from broker.domain.job import AttemptState
from broker.runtime.provider_gate import RateLimitedProvider
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from tests.clouds.warp import LoopClock
from tests.controllers.virtual import WORTH, Virtual, told
from tests.support.memory_store.store import MemoryStore

MACHINES = 30
CONFIG = SimulatedConfig.model_validate(
    {
        "body": "virtual", "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 1e6, "boot_s": 30, "beat_s": 5, "tick_s": 0.5},
    }
)  # fmt: skip


class Slow(SimulatedProvider):
    @property
    def caps(self) -> Caps:
        return replace(super().caps, calls_per_s=1.0, list_lag_s=15.0)


def test_destroys_that_wait_for_their_turn_keep_it(tmp_path: Path) -> None:
    """Every other call is a listing. None is cut for its row's sake, and begins at the end of the queue again."""

    async def story() -> None:
        house = Virtual(store=MemoryStore(LoopClock()), config=CONFIG, state=tmp_path, cloud=Slow)
        jobs = [await house.submit(**WORTH) for _ in range(MACHINES)]
        house.provider = RateLimitedProvider(house.provider, house.clock)  # type: ignore[assignment]
        async with house.running():
            await house.train(jobs)
            stopped = house.clock.monotonic()
            for job in jobs:
                await house.stop(job)
            while await house.machines():
                await house.clock.sleep(1)
            assert house.clock.monotonic() - stopped <= 2 * MACHINES + 20
            await house.clock.sleep(120)
            ends = [await house.attempts(job) for job in jobs]
        assert [attempt.state for (attempt,) in ends] == [AttemptState.ENDED] * MACHINES
        assert [attempt.destroy_failures for (attempt,) in ends] == [0] * MACHINES

    told(story())
