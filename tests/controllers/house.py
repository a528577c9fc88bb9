"""A whole broker around virtual machines: real controllers, a real store, real blobs; nothing is bought."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext, CostSettings, Intervals
from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.ids import Installation, JobId, job_id
from broker.domain.job import Attempt, AttemptState, Event, Job, JobState
from broker.domain.offer import Offer
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.lifecycle.liveness import LivenessTimeouts
from broker.ports import Blobs, Notifier, Store
from broker.runtime.clock import SystemClock
from broker.runtime.control_loop import run_forever
from broker.runtime.secret_box import SecretBox
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from trainer.contract.documents import Limits

INSTALLATION = Installation("test")
QUICK = Intervals(
    poll_s=0.02, look_s=0.05, list_s=0.02, billing_s=0.05, sweep_s=0.1, deadman_s=1, lease_s=2, replace_s=0.2
)  # fmt: skip
GUARD_S = 300.0
"""Ends a hang, and nothing else."""
BOX = SecretBox(bytes(32))
WORKLOAD = Workload(shape=None, method="script")
SILENT = {"run_s": 3600, "boot_s": 0.05, "beat_s": 3600, "tick_s": 0.02}
"""A virtual machine whose agent beats once, for jobs that also `SAVE_RARELY`: a save would beat, too."""
SAVE_RARELY = {"every_s": 3600}
ENDLESS = {"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100}
"""A virtual machine that trains until `House.completed` ends it; a busy broker may miss one that is soon done."""


class Clock(SystemClock):
    """In which a machine that stands still takes no time: what passes between two looks at it is `MOST_S` at most.
    Controllers look many times a second, so else it is the real one. `forward` makes time pass at once."""

    MOST_S = 0.25

    def __init__(self) -> None:
        self._began, self._since_s, self._seen = super().now(), 0.0, time.monotonic()

    def now(self) -> datetime:
        return self._began + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        seen = time.monotonic()
        self._since_s += min(seen - self._seen, self.MOST_S)
        self._seen = seen
        return self._since_s

    def forward(self, seconds: float) -> None:
        self._since_s += seconds


@dataclass(kw_only=True)
class House:
    """One or more broker processes' worth of controllers on one store, one blob store and one cloud."""

    store: Store
    config: SimulatedConfig
    state: Path
    intervals: Intervals = QUICK
    timeouts: LivenessTimeouts = field(default_factory=LivenessTimeouts)
    limits: Limits = field(default_factory=lambda: Limits(drain_s=2))
    costs: CostSettings = field(default_factory=CostSettings)
    forbidden: Callable[[JobSpec], str] = lambda spec: ""
    cloud: type[SimulatedProvider] = SimulatedProvider
    notifiers: Sequence[Notifier] = ()
    for_sale: Sequence[Offer] | None = None
    """Instead of what the market says."""

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.blobs: Blobs = ObstoreBlobs.open(f"file://{self.state}/blobs", INSTALLATION)
        self.body = VirtualBackend(self.blobs, self.clock, self.config.virtual, seed=self.config.seed)
        self.provider = self.cloud(
            self.config, self.body, installation=INSTALLATION, state=self.state / "simulated", clock=self.clock
        )
        self.market = MarketPoller({"simulated": self.provider}, self.clock, MarketIntervals())

    def fleet(self, owner: str) -> Fleet:
        context = ControllerContext(
            installation=INSTALLATION, owner=owner, store=self.store, blobs=self.blobs,
            providers={"simulated": self.provider}, clock=self.clock, intervals=self.intervals, limits=self.limits,
            timeouts=self.timeouts, costs=self.costs, forbidden=self.forbidden,
        )  # fmt: skip
        return Fleet.build(context, BOX, self._offers, self.notifiers)

    def _offers(self) -> Sequence[Offer]:
        return self.market.offers() if self.for_sale is None else self.for_sale

    @asynccontextmanager
    async def running(self, *owners: str) -> AsyncIterator["House"]:
        """Controllers of every owner until the block ends."""
        await self.market.step()
        fleets = [asyncio.create_task(self.fleet(o).run()) for o in owners or ("one",)]
        fleets.append(asyncio.create_task(run_forever(self.market, self.clock)))
        try:
            yield self
        finally:
            for task in fleets:
                task.cancel()
            await asyncio.gather(*fleets, return_exceptions=True)
            await self.provider.close()

    async def submit(self, workload: Workload = WORKLOAD, *, id: JobId | None = None, **changes: Any) -> JobId:
        """`workload`: what the preflight would have found; `id`: instead of a random one."""
        values: dict[str, Any] = {
            "name": "job", "cap_usd": "10", "script": {"code": "upload:" + "0" * 64, "command": ["true"]},
            "checkpoint": {"every_s": 1},
        }  # fmt: skip
        spec = JobSpec.model_validate(values | changes)
        job = Job(
            id=id or job_id(os.urandom(9)), owner="me", spec=spec, workload=workload, created_at=self.clock.now(),
            cap_usd=spec.cap_usd,
        )  # fmt: skip
        await self.store.submit(job, key=None, body_sha256="", events=())
        return job.id

    async def until(self, job: JobId, true: Callable[[Job], bool], *, within_s: float = GUARD_S) -> Job:
        """The job once `true` of it; fails with its story otherwise."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    found = await self.store.job(job)
                    assert found is not None
                    if true(found):
                        return found
                    await self.store.wait(f"job/{job}", 0.05)
        except TimeoutError:
            story = [f"{e.kind}: {e.message}" for e in await self.store.events(job, after=0, limit=200)]
            attempts = [(a.state, a.reason, a.detail) for a in await self.store.attempts(job)]
            raise AssertionError(f"still {found} after {within_s} s; attempts {attempts}; events {story}") from None

    async def state_of(self, job: JobId, *states: JobState, within_s: float = GUARD_S) -> Job:
        return await self.until(job, lambda j: j.state in states, within_s=within_s)

    async def completed(self, job: JobId) -> Job:
        """The job once it has succeeded: its machines complete as soon as the broker knows that they train."""

        async def done() -> bool:
            if any(attempt.state is AttemptState.TRAINING for attempt in await self.attempts(job)):
                self.finish()
            found = await self.store.job(job)
            return found is not None and found.state is JobState.SUCCEEDED

        await self.eventually(done)
        return await self.state_of(job, JobState.SUCCEEDED)

    def finish(self) -> None:
        """All machines complete what they train."""
        for machine in self.body._instances.values():
            machine.ends_at = 0.0

    async def stop(self, job: JobId) -> None:
        await self.store.request_stop(job, Event(job_id=job, kind="job.stop_requested", message="stop"))

    async def events(self, job: JobId) -> list[Event]:
        return list(await self.store.events(job, after=0, limit=1000))

    async def attempts(self, job: JobId) -> list[Attempt]:
        return list(await self.store.attempts(job))

    async def eventually(self, true: Callable[[], Awaitable[bool]], *, within_s: float = GUARD_S) -> None:
        """Polls the outside world, which has no other way to tell us."""
        async with asyncio.timeout(within_s):
            while not await true():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def machines(self) -> list[str]:
        """What the cloud itself still has."""
        return [o.handle.name for o in await self.body.machines() if o.state.value != "gone"]


def config(**changes: Any) -> SimulatedConfig:
    values: dict[str, Any] = {
        "body": "virtual", "seed": 1, "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 0.4, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100},
    }  # fmt: skip
    return SimulatedConfig.model_validate(values | changes)


def new_state() -> Path:
    return Path(tempfile.mkdtemp(prefix="gb-house-"))


def spent(attempts: list[Attempt]) -> Decimal:
    return sum((a.charged_usd for a in attempts), Decimal(0))
