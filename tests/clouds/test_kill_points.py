"""Kills of broker, launch server or both at twenty points of a launch leave one machine, no orphan and a true ledger.

The controllers, the native halves of the clouds and their HTTP APIs are real. The server behind the launcher creates
machines by the calls that SkyPilot makes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.ids import Installation, job_id
from broker.domain.instance import TrainerImage
from broker.domain.job import RESTING_JOB_STATES, Attempt, AttemptState, Job, JobState
from broker.domain.money import LedgerKind
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.ports import Change
from broker.runtime.control_loop import run_forever
from broker.runtime.secret_box import SecretBox
from providers.common.account_guard import Account
from providers.common.cloud import CloudProvider
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.vast.provider import VastCloud, VastConfig
from tests.clouds.emulator import Clouds
from tests.clouds.paper import Agents, FarBlobs, Host, PaperLauncher, Server, SlowMachines
from tests.clouds.warp import Life, LoopClock, Mortal, MortalCloud, Point, ReleasingClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.virtual_time import run_in_virtual_time
from trainer.contract.documents import Limits

CLOUDS = ("lambda", "runpod", "vast")
KILLED = ("broker", "server", "both")
POINTS = (
    "before the intent",
    "after the intent",
    "before create_sent_at",
    "after create_sent_at",
    "after spec.json",
    "before the launch is asked for",
    "the launch is asked for",
    "the server has begun",
    "before the key is registered",
    "the key is registered",
    "before the create request",
    "the create request is answered unread",
    "create has answered",
    "the machine boots",
    "the machine is set up",
    "the agent is started",
    "the agent has beaten",
    "the launch is answered",
    "before the answer is written",
    "after the answer is written",
)
BARE = POINTS[POINTS.index("the create request is answered unread") : POINTS.index("the agent is started")]
"""Points at which a machine runs and only the server would start its agent."""
LISTING = {"lambda": ("instances",), "runpod": ("listPods", "myself"), "vast": ("instances",)}
CREATING = {
    "lambda": ("launch",),
    "runpod": ("podRentInterruptable", "podFindAndDeployOnDemand"),
    "vast": ("create-instance",),
}
INSTALLATION = Installation("test")
INTERVALS = Intervals(poll_s=4, look_s=4, list_s=4, sweep_s=30, deadman_s=60, replace_s=15, grants_s=60)
LAG_S = 8
"""Listing delay of the emulated clouds; all caps promise 10 at most."""
PRECISION = Decimal("0.0001")
AWAY_S = 12.0
"""Seconds from the death of a broker to the start of the next one."""
SOON_S = 12.0
"""Seconds between two polls of an attempt."""


class WatchedStore(Mortal):
    """Store that reports the writes at which a test may kill."""

    def __init__(self, port: Any, life: Life, point: Point) -> None:
        super().__init__(port, life)
        self._point = point

    async def apply(self, changes: Any) -> Any:
        self._life.check()
        names = {what for change in changes if (what := _written(change))}
        for name in names:
            self._point.reached(f"before {name}", self._life)
        held = await self._port.apply(changes)
        for name in names:
            self._point.reached(f"after {name}", self._life)
        self._life.check()
        return held


class WatchedBlobs(Mortal):
    def __init__(self, port: Any, life: Life, point: Point) -> None:
        super().__init__(port, life)
        self._point = point

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        spec = key.endswith("/spec.json")
        self._life.check()
        if spec:
            self._point.reached("before spec.json", self._life)
        etag = await self._port.put(key, data, if_absent=if_absent)
        if spec:
            self._point.reached("after spec.json", self._life)
        self._life.check()
        return str(etag)


def _written(change: Change) -> str | None:
    if change.admit is not None:
        return "the intent"
    if change.attempt is None:
        return None
    match (change.attempt[0].state, change.attempt[1].state):
        case (AttemptState.PLANNED, AttemptState.LAUNCHING):
            return "create_sent_at"
        case (AttemptState.LAUNCHING, AttemptState.BOOTING):
            return "the answer is written"
    return None


class Story:
    """One job at one cloud, with one kill."""

    def __init__(self, clouds: Clouds, cloud: str, point: str, killed: str, home: Path) -> None:
        self.clouds, self._cloud, self._killed, self._home = clouds, cloud, killed, home
        self.clock = LoopClock()
        self.store = MemoryStore(self.clock)
        self.blobs = FarBlobs.in_memory(INSTALLATION)
        self.agents = Agents(self.blobs)
        self.point = Point(point, self._kill)
        self.host = Host(lambda n: Server(n, clouds, self.agents, self.point))
        self.life = Life()
        self._brokers: list[tuple[Life, asyncio.Task[None]]] = []

    def _kill(self) -> None:
        if self._killed in ("broker", "both"):
            life, broker = self._brokers[0]
            life.over = True
            asyncio.get_running_loop().call_soon(broker.cancel)
        if self._killed in ("server", "both"):
            self.host.kill()

    def start_broker(self) -> None:
        life = Life()
        self._brokers.append((life, asyncio.create_task(self._broker(life, f"broker-{len(self._brokers) + 1}"))))

    async def _broker(self, life: Life, owner: str) -> None:
        clock: Any = Mortal(self.clock, life)
        cloud = MortalCloud(_cloud(self._cloud, self.clouds.url, clock, self._home), life)
        account = Account(cloud, self._home / "account.json")
        provider = CloudProvider(cloud, PaperLauncher(self.host, life, self.point), account, installation=INSTALLATION)
        store: Any = WatchedStore(self.store, life, self.point)
        blobs: Any = WatchedBlobs(self.blobs, life, self.point)
        context = ControllerContext(
            installation=INSTALLATION, owner=owner, store=store, blobs=blobs,
            providers={self._cloud: provider}, clock=clock, intervals=INTERVALS, limits=Limits(drain_s=30),
        )  # fmt: skip
        market = MarketPoller({self._cloud: provider}, clock, MarketIntervals(poll_s=300))

        async def trainer(*, for_image: bool) -> TrainerImage:
            return TrainerImage(reference="r/i@sha256:" + "0" * 64)

        try:
            await market.step()
            fleet = Fleet.build(context, SecretBox(bytes(32)), market.offers, (), trainer=trainer)
            async with asyncio.TaskGroup() as group:
                group.create_task(fleet.run())
                group.create_task(run_forever(market, clock))
        finally:
            await cloud._port.close()

    async def submit(self) -> Job:
        values = {"name": "job", "cap_usd": "10", "script": {"code": "upload:" + "0" * 64, "command": ["true"]}}
        spec = JobSpec.model_validate(values)
        job = Job(
            id=job_id(bytes(9)), owner="me", spec=spec, workload=Workload(shape=None, method="script"),
            created_at=self.clock.now(), cap_usd=spec.cap_usd,
        )  # fmt: skip
        await self.store.submit(job, key=None, body_sha256="", events=())
        return job

    async def rest(self, job: Job, *, within_s: float = 3600.0) -> Job:
        async with asyncio.timeout(within_s):
            while True:
                stored_job = await self.store.job(job.id)
                assert stored_job is not None
                if stored_job.state in RESTING_JOB_STATES:
                    return stored_job
                await asyncio.sleep(5)

    async def told(self, job: Job) -> str:
        lines = [f"{e.at} {e.kind}: {e.message}" for e in await self.store.events(job.id, after=0, limit=200)]
        for a in await self.store.attempts(job.id):
            lines.append(f"{a.number} {a.state} {a.reason} {a.detail} {a.launched_by}")
        return "\n".join([*lines, *(f"{e.at} {e.kind} {e.name}" for e in self.clouds.world.events)])

    async def close(self) -> None:
        for life, broker in self._brokers:
            life.over = True
            broker.cancel()
            await asyncio.gather(broker, return_exceptions=True)
        await self.host.close()
        await self.agents.close()


def _cloud(name: str, url: str, clock: Any, home: Path) -> Any:
    env = {f"{name.upper()}_API_KEY": "test-key"}
    given: Any = {"installation": INSTALLATION, "clock": clock, "env": env, "home": home}
    match name:
        case "lambda":
            return LambdaCloud(LambdaConfig(endpoint=url), **given)
        case "runpod":
            return RunpodCloud(RunpodConfig(endpoint=url, gpu_counts=(1,), regions=("US",)), **given)
    return VastCloud(VastConfig(endpoint=url), **given, rate_clock=ReleasingClock())


@pytest.mark.parametrize("killed", KILLED)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_kill_at_each_point_of_a_launch_leaves_no_orphan(cloud: str, point: str, killed: str, tmp_path: Path) -> None:
    run_in_virtual_time(_killed(cloud, point, killed, tmp_path))


@pytest.mark.parametrize("killed", KILLED)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_kill_while_listings_are_empty_leaves_no_orphan(cloud: str, killed: str, tmp_path: Path) -> None:
    run_in_virtual_time(_killed(cloud, "create has answered", killed, tmp_path, blind=True))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_create_whose_reply_is_lost(cloud: str, tmp_path: Path) -> None:
    """The server gives up, or repeats the create and is refused as sold out. Its machine is given back either way."""
    run_in_virtual_time(_reply_lost(cloud, tmp_path))


async def _killed(cloud: str, point: str, killed: str, home: Path, *, blind: bool = False) -> None:
    async with _story(cloud, point, killed, home) as story:
        job = await story.submit()
        story.start_broker()
        async with asyncio.timeout(600):
            await story.point.passed.wait()
        if blind:
            # RunPod's broker lists by REST, SkyPilot by GraphQL; a dead server lists nothing.
            for call in LISTING[cloud] if killed == "broker" else LISTING[cloud][:1]:
                story.clouds.control.fail(cloud=cloud, call=call, status=500, times=20)
        if killed != "server":
            await asyncio.sleep(AWAY_S)
            story.start_broker()
        # A machine without an agent is given back after its launcher died; every other machine is adopted as it is.
        lost = blind or (point in BARE and killed != "broker")
        await _ends_well(story, job, tries=2 if lost else 1)


async def _reply_lost(cloud: str, home: Path) -> None:
    async with _story(cloud, "nowhere", "nobody", home) as story:
        for call in CREATING[cloud]:
            story.clouds.control.fail(cloud=cloud, call=call, trouble="drop", done=True)
        job = await story.submit()
        story.start_broker()
        await _ends_well(story, job, tries=2)


@asynccontextmanager
async def _story(cloud: str, point: str, killed: str, home: Path) -> AsyncIterator[Story]:
    clock = LoopClock()
    async with Clouds(SlowMachines(), now=clock.now) as clouds:
        clouds.control.list_lag(cloud, LAG_S)  # type: ignore[arg-type]
        story = Story(clouds, cloud, point, killed, home)
        try:
            yield story
            assert clouds.violations == []
        finally:
            await story.close()


async def _ends_well(story: Story, job: Job, *, tries: int) -> None:
    try:
        done = await story.rest(job)
    except TimeoutError:
        raise AssertionError(await story.told(job)) from None
    assert done.state is JobState.SUCCEEDED, await story.told(job)
    assert story.clouds.bill().open() == [], await story.told(job)
    attempts = await story.store.attempts(job.id)
    assert len(attempts) == tries, await story.told(job)
    for attempt in attempts:
        await _honest(story, attempt)


async def _honest(story: Story, attempt: Attempt) -> None:
    """Check that one machine at most ran, none outlived the attempt, and the ledger is the bill plus a bounded
    uncertainty.
    """
    lives = [(machine.created_at, machine.gone_at) for machine in story.clouds.world.named(attempt.name)]
    assert len(lives) == 1, lives
    assert attempt.ended_at is not None
    assert all(end is not None and end <= attempt.ended_at for _, end in lives), lives
    assert story.agents.started[attempt.id] <= 1
    ledger = await story.store.ledger(attempt.job_id)
    kinds = (LedgerKind.CHARGE, LedgerKind.ADJUSTMENT)
    charged = sum((e.usd for e in ledger if e.attempt_id == attempt.id and e.kind in kinds), Decimal(0))
    assert charged >= story.clouds.bill().usd(attempt.name)
    assert attempt.absent_at is not None
    assert attempt.create_sent_at is not None
    ((_, gone),) = lives
    assert gone is not None
    lags = 1 if attempt.booted_at else 2  # the creation time of a machine that never booted is unknown
    assert attempt.absent_at - gone <= timedelta(seconds=lags * LAG_S + SOON_S)
    offer = attempt.line.offer
    whole_s = (attempt.absent_at - attempt.create_sent_at).total_seconds() + offer.billing_quantum_s
    assert charged <= offer.usd_per_hour * Decimal(whole_s) / 3600 + PRECISION
