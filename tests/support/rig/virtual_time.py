"""A `BrokerRig` whose waits take no time, at the intervals of the daemon."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.controllers.base.context import Intervals
from broker.domain.ids import JobId
from broker.domain.job import Attempt, AttemptState
from broker.ports import Blobs
from tests.clouds.paper import FarBlobs
from tests.clouds.warp import LoopClock, WarpLoop
from tests.support.rig.broker_rig import INSTALLATION, BrokerRig
from trainer.contract.documents import Limits

WORTH: dict[str, Any] = {"cap_usd": "1000", "retry": {"max": 50}, "checkpoint": {"every_s": 60}}
"""Fields of a job that neither its cap nor its retries end."""


def run_in_virtual_time(story: Coroutine[Any, Any, None]) -> None:
    """Run a test in an event loop in which waiting takes no time."""
    with asyncio.Runner(loop_factory=WarpLoop) as runner:
        runner.run(story)


@dataclass(kw_only=True)
class VirtualTimeRig(BrokerRig):
    """Rig for tests that wait for minutes to days. Use it within `run_in_virtual_time`, with a `MemoryStore`."""

    intervals: Intervals = field(default_factory=Intervals)
    limits: Limits = field(default_factory=Limits)

    def open_clock(self) -> LoopClock:  # type: ignore[override]
        return LoopClock()

    def open_blobs(self) -> Blobs:
        return FarBlobs.in_memory(INSTALLATION)

    async def train(self, jobs: Sequence[JobId]) -> list[Attempt]:
        """Return the first attempts of the jobs once all are training."""
        while self.clock.monotonic() < 300:
            first = [attempts[0] for job in jobs if (attempts := await self.attempts(job))]
            if len(first) == len(jobs) and all(a.state is AttemptState.TRAINING for a in first):
                return first
            await self.clock.sleep(1)
        raise AssertionError("they do not train")
