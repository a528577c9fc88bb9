"""The house of `house.py` in time that takes none, and a cloud that shows deaths as real ones do."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from broker.controllers.base.context import Intervals
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.ids import JobId
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Attempt, AttemptState
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from tests.clouds.paper import FarBlobs
from tests.clouds.warp import LoopClock, WarpLoop
from tests.controllers.house import INSTALLATION, House
from trainer.contract.documents import Limits

Shown = Literal["gone", "stopped", "omitted"]
"""What a cloud's listing makes of a machine that was taken away."""


def told(story: Coroutine[Any, Any, None]) -> None:
    """In a loop in which waiting takes no time."""
    with asyncio.Runner(loop_factory=WarpLoop) as runner:
        runner.run(story)


class Deaths(SimulatedProvider):
    """Its listings call a dead machine running for up to `lag_s`, and then what `shown` says."""

    shown: Shown = "gone"
    lag_s = 0.0
    died: dict[str, float]
    sees: dict[str, float]

    @property
    def caps(self) -> Caps:
        return replace(super().caps, list_lag_s=self.lag_s)

    def kill(self, name: str, after_s: float, draw: random.Random) -> None:
        """Without notice."""
        now = self._clock.monotonic()
        machine = self._body._instances[name]  # type: ignore[attr-defined]
        machine.dies_at = self.died[name] = now + after_s
        self.sees[name] = machine.dies_at + draw.uniform(0, self.lag_s)

    async def list(self) -> Sequence[Observed]:
        return [shown for o in await super().list() if (shown := self._as_shown(o)) is not None]

    def _as_shown(self, machine: Observed) -> Observed | None:
        if machine.handle.name not in self.died or machine.state is not InstanceState.GONE:
            return machine
        if self._clock.monotonic() < self.sees[machine.handle.name]:
            return replace(machine, state=InstanceState.RUNNING)
        if self.shown == "omitted":
            return None
        return replace(machine, state=InstanceState.STOPPED) if self.shown == "stopped" else machine


@dataclass(kw_only=True)
class Virtual(House):
    """At the daemon's own intervals."""

    def __post_init__(self) -> None:
        self.clock = LoopClock()  # type: ignore[assignment]
        self.intervals, self.limits = Intervals(), Limits()
        self.blobs = FarBlobs.in_memory(INSTALLATION)
        self.body = VirtualBackend(self.blobs, self.clock, self.config.virtual, seed=self.config.seed)
        self.provider = self.cloud(
            self.config, self.body, installation=INSTALLATION, state=self.state / "simulated", clock=self.clock
        )
        if isinstance(self.provider, Deaths):
            self.provider.died, self.provider.sees = {}, {}
        self.market = MarketPoller({"simulated": self.provider}, self.clock, MarketIntervals())

    async def train(self, jobs: Sequence[JobId]) -> list[Attempt]:
        """Their first attempts, once all are training."""
        while self.clock.monotonic() < 300:
            first = [one[0] for job in jobs if (one := await self.attempts(job))]
            if len(first) == len(jobs) and all(a.state is AttemptState.TRAINING for a in first):
                return first
            await self.clock.sleep(1)
        raise AssertionError("they do not train")


WORTH: dict[str, Any] = {"cap_usd": str(Decimal(1000)), "retry": {"max": 50}, "checkpoint": {"every_s": 60}}
"""Of a job that is not to end for another reason."""
