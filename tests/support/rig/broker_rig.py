"""A whole broker in this process: real controllers, a real store, real blobs and virtual machines."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
from broker.ports import Blobs, Clock, Notifier, Provider, Store
from broker.runtime.control_loop import run_forever
from broker.runtime.secret_box import SecretBox
from providers.simulated.config import SimulatedConfig
from providers.simulated.virtual_backend import VirtualBackend
from tests.support.rig.clock import StallTolerantClock
from tests.support.rig.simulated_cloud import CloudFaults, SimulatedCloud
from trainer.contract.documents import Limits

INSTALLATION = Installation("test")
CLOUD = "simulated"
QUICK = Intervals(
    poll_s=0.02, look_s=0.05, list_s=0.02, billing_s=0.05, sweep_s=0.1, deadman_s=1, lease_s=2, replace_s=0.2
)  # fmt: skip
GUARD_S = 300.0
"""Seconds after which a wait is treated as a hang."""
BOX = SecretBox(bytes(32))
WORKLOAD = Workload(shape=None, method="script")
SILENT = {"run_s": 3600, "boot_s": 0.05, "beat_s": 3600, "tick_s": 0.02}
"""A virtual machine whose agent sends one heartbeat, for jobs that also `SAVE_RARELY`: a save sends one, too."""
SAVE_RARELY = {"every_s": 3600}
ENDLESS = {"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100}
"""A virtual machine that trains until `BrokerRig.completed` ends it; a busy broker may miss a shorter one."""


def build_fleet(
    *,
    owner: str,
    store: Store,
    blobs: Blobs,
    provider: Provider,
    clock: Clock,
    offers: Callable[[], Sequence[Offer]],
    notifiers: Sequence[Notifier] = (),
    troubles: Callable[[], Mapping[str, str]] = dict,
    **settings: Any,
) -> Fleet:
    """Build the controllers of one broker process; `settings` of its `ControllerContext`."""
    context = ControllerContext(
        installation=INSTALLATION, owner=owner, store=store, blobs=blobs, providers={CLOUD: provider}, clock=clock,
        **settings,
    )  # fmt: skip
    return Fleet.build(context, BOX, offers, notifiers, troubles=troubles)


@dataclass(kw_only=True)
class BrokerRig:
    """The controllers of one or more broker processes on one store, one blob store and one cloud, in real time."""

    store: Store
    config: SimulatedConfig
    state: Path
    """A folder of this rig only."""
    intervals: Intervals = QUICK
    timeouts: LivenessTimeouts = field(default_factory=LivenessTimeouts)
    limits: Limits = field(default_factory=lambda: Limits(drain_s=2))
    costs: CostSettings = field(default_factory=CostSettings)
    forbidden: Callable[[JobSpec], str] = lambda spec: ""
    cloud: type[SimulatedCloud] = SimulatedCloud
    faults: CloudFaults = field(default_factory=CloudFaults)
    notifiers: Sequence[Notifier] = ()
    for_sale: Sequence[Offer] | None = None
    """Offers instead of the market's; None: the market's."""

    def __post_init__(self) -> None:
        self.clock = self.open_clock()
        self.blobs = self.open_blobs()
        self.body = VirtualBackend(self.blobs, self.clock, self.config.virtual, seed=self.config.seed)
        self.open_cloud()

    def open_clock(self) -> StallTolerantClock:
        return StallTolerantClock()

    def open_blobs(self) -> Blobs:
        return ObstoreBlobs.open(f"file://{self.state}/blobs", INSTALLATION)

    def open_cloud(self) -> None:
        self.provider = self.cloud(
            self.config, self.body, installation=INSTALLATION, state=self.state / CLOUD, clock=self.clock,
            faults=self.faults,
        )  # fmt: skip
        self.market = MarketPoller({CLOUD: self.provider}, self.clock, MarketIntervals())

    def reopen_cloud(self) -> None:
        """Open the cloud again, as a new broker process does. The machines and the log of calls stay."""
        extra, calls = self.provider.extra, self.provider.calls
        self.open_cloud()
        self.provider.extra, self.provider.calls = extra, calls

    def fleet(self, owner: str) -> Fleet:
        """Build the controllers of the broker process `owner`."""
        return build_fleet(
            owner=owner, store=self.store, blobs=self.blobs, provider=self.provider, clock=self.clock,
            offers=self._offers, notifiers=self.notifiers, intervals=self.intervals, limits=self.limits,
            timeouts=self.timeouts, costs=self.costs, forbidden=self.forbidden,
        )  # fmt: skip

    def _offers(self) -> Sequence[Offer]:
        return self.market.offers() if self.for_sale is None else self.for_sale

    @asynccontextmanager
    async def running(self, *owners: str) -> AsyncIterator["BrokerRig"]:
        """Run the controllers of every owner, or of one broker, until the block ends."""
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
        """Submit a job and return its id. `workload`: the preflight's; `id`: None for a random one."""
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

    async def until(self, job: JobId, condition: Callable[[Job], bool], *, within_s: float = GUARD_S) -> Job:
        """Return the job once `condition` holds. Raise AssertionError with its attempts and events after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    row = await self.store.job(job)
                    assert row is not None
                    if condition(row):
                        return row
                    await self.store.wait(f"job/{job}", 0.05)
        except TimeoutError:
            events = [f"{e.kind}: {e.message}" for e in await self.store.events(job, after=0, limit=200)]
            attempts = [(a.state, a.reason, a.detail) for a in await self.store.attempts(job)]
            raise AssertionError(f"still {row} after {within_s} s; attempts {attempts}; events {events}") from None

    async def state_of(self, job: JobId, *states: JobState, within_s: float = GUARD_S) -> Job:
        return await self.until(job, lambda j: j.state in states, within_s=within_s)

    async def completed(self, job: JobId) -> Job:
        """Return the job once it has succeeded. Its machines complete as soon as the broker records that they train."""

        async def done() -> bool:
            if any(attempt.state is AttemptState.TRAINING for attempt in await self.attempts(job)):
                self.finish()
            row = await self.store.job(job)
            return row is not None and row.state is JobState.SUCCEEDED

        await self.eventually(done)
        return await self.state_of(job, JobState.SUCCEEDED)

    def finish(self) -> None:
        """Let all machines complete their training now."""
        for machine in self.body._instances.values():
            machine.ends_at = 0.0

    async def stop(self, job: JobId) -> None:
        await self.store.request_stop(job, Event(job_id=job, kind="job.stop_requested", message="stop"))

    async def events(self, job: JobId) -> list[Event]:
        return list(await self.store.events(job, after=0, limit=1000))

    async def attempts(self, job: JobId) -> list[Attempt]:
        return list(await self.store.attempts(job))

    async def eventually(self, condition: Callable[[], Awaitable[bool]], *, within_s: float = GUARD_S) -> None:
        """Poll until `condition` holds, for states that no event announces."""
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def machines(self) -> list[str]:
        """Return the names of the machines that exist at the cloud."""
        return [o.handle.name for o in await self.body.machines() if o.state.value != "gone"]


RigBuilder = Callable[..., BrokerRig]
"""Builds a `BrokerRig` on the test's store: `build(cloud, cloud_faults=..., **changes of config)`."""


def config(**changes: Any) -> SimulatedConfig:
    values: dict[str, Any] = {
        "body": "virtual", "seed": 1, "hazard_scale": 0, "sold_out": 0,
        "virtual": {"run_s": 0.4, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100},
    }  # fmt: skip
    return SimulatedConfig.model_validate(values | changes)


def new_state() -> Path:
    return Path(tempfile.mkdtemp(prefix="gb-rig-"))


def spent(attempts: list[Attempt]) -> Decimal:
    return sum((a.charged_usd for a in attempts), Decimal(0))
