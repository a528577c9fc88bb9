"""Measures the seconds from a death without notice to the plan of the next attempt, in virtual time.

python -m tests.controllers.detection # the table of docs/guide/spot-and-deadlines.md
"""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.runtime.clock import SystemClock
from providers.simulated.config import SimulatedConfig
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import new_state
from tests.support.rig.simulated_cloud import CloudFaults, DeathShown
from tests.support.rig.virtual_time import WORTH, VirtualTimeRig, run_in_virtual_time

CLOUDS: dict[str, tuple[DeathShown, float]] = {
    "runpod": ("stopped", 10.0), "vast": ("stopped", 10.0), "lambda": ("omitted", 15.0), "aws": ("gone", 20.0),
    "runpod, unlisted": ("omitted", 10.0), "local": ("gone", 0.0),
}  # fmt: skip
"""Form in which each cloud lists a preempted machine, and its `Caps.list_lag_s`. The delay until then is uniform within
the lag.
"""
BEAT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Seconds since each death."""

    terminating: Sequence[float]
    planned: Sequence[float]

    @staticmethod
    def share(of: Sequence[float], percent: int) -> float:
        return sorted(of)[min(len(of) - 1, len(of) * percent // 100)]


def config() -> SimulatedConfig:
    return SimulatedConfig.model_validate(
        {
            "body": "virtual", "seed": 1, "hazard_scale": 0, "sold_out": 0,
            "virtual": {"run_s": 1e6, "boot_s": 30, "beat_s": BEAT_S, "tick_s": 0.5},
        }
    )  # fmt: skip


def measure(shown: DeathShown, lag_s: float, *, jobs: int, seed: int = 7) -> Delays:
    """Return the delays after `jobs` machines of one broker were preempted, each at another moment."""
    measured: list[Delays] = []

    async def story() -> None:
        faults = CloudFaults(caps={"list_lag_s": lag_s}, death_shown=shown)
        rig = VirtualTimeRig(store=MemoryStore(LoopClock()), config=config(), state=new_state(), faults=faults)
        draw, provider = random.Random(seed), rig.provider
        async with rig.running():
            ids = [await rig.submit(**WORTH) for _ in range(jobs)]
            for attempt in await rig.train(ids):
                provider.preempt(attempt.name, after_s=draw.uniform(20, 80), shown_after_s=draw.uniform(0, lag_s))
            await rig.clock.sleep(400)
            terminated_at, next_at = [], []
            for job in ids:
                first, second, *more = await rig.attempts(job)
                assert not more
                died = provider.died_at[first.name]
                assert first.terminating_since is not None
                terminated_at.append(_since_start(rig, first.terminating_since) - died)
                next_at.append(_since_start(rig, second.created_at) - died)
            measured.append(Delays(terminating=terminated_at, planned=next_at))
        shutil.rmtree(rig.state, ignore_errors=True)

    run_in_virtual_time(story())
    return measured[0]


def _since_start(rig: VirtualTimeRig, when: Any) -> float:
    return float((when - rig.clock.now()).total_seconds() + rig.clock.monotonic())


def main() -> None:
    began = SystemClock().monotonic()
    print("| cloud | shows it as | list lag | terminating p50, p95, max | next planned p50, p95, max |")
    print("|---|---|---|---|---|")
    for cloud, (shown, lag_s) in CLOUDS.items():
        delays = measure(shown, lag_s, jobs=100)
        cells = [
            ", ".join(f"{Delays.share(of, percent):.1f}" for percent in (50, 95, 100))
            for of in (delays.terminating, delays.planned)
        ]
        print(f"| {cloud} | {shown} | {lag_s:g} s | {cells[0]} s | {cells[1]} s |")
    print(f"100 deaths each, beats every {BEAT_S:g} s; {SystemClock().monotonic() - began:.0f} s of this machine")


if __name__ == "__main__":
    main()
