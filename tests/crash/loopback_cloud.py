"""Cloud behind HTTP on loopback with its own log and bill, and the provider through which a daemon uses it.

The cloud runs outside the daemons because it must outlive them; `tests.support.rig.simulated_cloud` runs in process. A
name that is bought twice is two machines. Listings miss new machines and show destroyed ones for up to `LAG_S`, and
show all machines of the account.
"""

import contextlib
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import Installation, InstanceName, attempt_of
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GIB, GpuAsk, Offer
from broker.runtime.clock import SystemClock
from providers.local.launcher_locks import LauncherLocks
from providers.local.machine import Machine
from providers.simulated.config import VirtualConfig
from providers.simulated.market import uniform_draw
from providers.simulated.virtual_backend import VirtualBackend, _Instance
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, Heartbeat, Outcome

NAME = "paper"
USD_PER_HOUR = Decimal("3.6")
LAG_S = 0.5
"""Longest time for which a listing misses a new machine, or still shows a destroyed one."""
CALL_S = 5.0
AGENT = VirtualConfig(run_s=0.4, steps=10, boot_s=0.05, beat_s=0.1, tick_s=0.02)
ENDLESS = AGENT.model_copy(update={"run_s": 1000.0, "steps": 100_000})
"""Agent that trains for longer than any test waits, at a hundred steps a second."""

# --------------------------------------------------------------------------------------------------------------- truth


@dataclass(frozen=True, kw_only=True)
class AgentKind:
    """Behaviour of a machine's agent."""

    config: VirtualConfig = AGENT
    faulty: bool = False
    """True: the user's program ends with an error instead of success."""


@dataclass(kw_only=True)
class CloudBehaviour:
    """The cloud's current behaviour towards one installation."""

    kind: AgentKind = field(default_factory=AgentKind)
    regions: tuple[str, ...] = ("here",)
    """Regions that offer machines."""
    sold_out: frozenset[str] = frozenset()
    """Regions that refuse creates for lack of capacity."""


class LoopbackAgents(VirtualBackend):
    """Agents whose machines stay, and bill, after the final report, as rented machines do."""

    def __init__(self, blobs: ObstoreBlobs, kind: AgentKind, seed: int) -> None:
        super().__init__(blobs, SystemClock(), kind.config, seed=seed)
        self._faulty = kind.faulty

    def take(self, name: str) -> None:
        """End the machine now, without notice."""
        self._instances[name].dies_at = self._clock.monotonic()

    def saved(self, name: str) -> bool:
        """Return True if the machine has committed a checkpoint."""
        return self._instances[name].saved is not None

    async def _advance(self, instance: _Instance, spec: AttemptSpec, now: float) -> None:
        if self._faulty and instance.ends_at <= min(now, instance.dies_at):
            step = self._step(instance, instance.ends_at)
            return await self._finish(instance, Outcome.USER_ERROR, step, "the program ended with an error")
        return await super()._advance(instance, spec, now)

    async def _finish(self, instance: _Instance, outcome: Outcome, step: int, message: str = "") -> None:
        await super()._finish(instance, outcome, step, message)
        beat = Heartbeat(attempt=instance.attempt, boot=instance.boot, seq=instance.seq + 1, phase="done", step=step)
        await self._blobs.put(keys.heartbeat(instance.attempt, 0), beat.model_dump_json().encode())


def usd_for(seconds: float) -> Decimal:
    """Return the price of the seconds; a started second counts as a whole one."""
    return max(0, math.ceil(seconds)) * USD_PER_HOUR / 3600


@dataclass(kw_only=True)
class SoldMachine:
    """A machine as the cloud records it; monotonic seconds."""

    id: str
    name: InstanceName
    attempt: str
    born: float
    region: str = "here"
    kind: AgentKind = field(default_factory=AgentKind)
    taken_at: float = math.inf
    """Time of the preemption; infinite: none."""
    destroyed: float = math.inf
    late: bool = False
    """True: created after its attempt's end was proven. It may exist at the same time as another machine of its job."""

    @property
    def born_at(self) -> datetime:
        """Return the time of the create by the wall clock."""
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - self.born)

    @property
    def ended(self) -> float:
        return min(self.destroyed, self.taken_at)

    def live(self, now: float) -> bool:
        return now < self.ended

    def usd(self, now: float) -> Decimal:
        """Return the cloud's charge for the whole seconds from the create to the end."""
        return usd_for(min(now, self.ended) - self.born)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An answered listing: when, to which broker process, and the machines that it showed as running."""

    at: float
    caller: str
    running: frozenset[str]


class LoopbackCloud:
    """The server. `preempts`: share of the machines that are taken away while they work."""

    def __init__(self, blobs_options: Mapping[str, str], bucket: str, *, seed: int = 0, preempts: float = 0.0) -> None:
        self._options, self._bucket = blobs_options, bucket
        self._seed, self._preempts = seed, preempts
        self._bodies: dict[tuple[Installation, AgentKind], LoopbackAgents] = {}
        self._runner: web.AppRunner | None = None
        self.sold: dict[str, SoldMachine] = {}
        self.listings: dict[Installation, list[Listed]] = defaultdict(list)
        self.behaviours: dict[Installation, CloudBehaviour] = defaultdict(CloudBehaviour)
        self.url = ""

    async def __aenter__(self) -> "LoopbackCloud":
        app = web.Application()
        app.router.add_get("/cloud/offers", self._offers)
        app.router.add_post("/cloud/create", self._create)
        app.router.add_get("/cloud/list", self._list)
        app.router.add_post("/cloud/destroy", self._destroy)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        for body in self._bodies.values():
            await body.close()

    async def _offers(self, request: web.Request) -> web.Response:
        regions = self.behaviours[Installation(request.query["installation"])].regions
        return web.json_response({"usd_per_hour": str(USD_PER_HOUR), "regions": regions})

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        behaviour = self.behaviours[installation_of(asked["name"])]
        if asked["region"] in behaviour.sold_out:
            return web.json_response({}, status=409)
        number = sum(machine.name == asked["name"] for machine in self.sold.values())
        sold = SoldMachine(
            id=f"{asked['name']}.{number}", name=InstanceName(asked["name"]), attempt=asked["attempt"],
            born=time.monotonic(), region=asked["region"], kind=behaviour.kind,
        )  # fmt: skip
        if uniform_draw(self._seed, "preempted", sold.id) < self._preempts:
            sold.taken_at = sold.born + 0.1 + 0.4 * uniform_draw(self._seed, "taken", sold.id)
        self.sold[sold.id] = sold
        machine = Machine(
            name=InstanceName(sold.id), provider=NAME, region=sold.region, accelerator="l40s", gpus=1, spot=False,
            lifetime_s=None if math.isinf(sold.taken_at) else sold.taken_at - sold.born,
        )  # fmt: skip
        await self._body(sold).start(machine, BootSpec(env={"GPUBROKER_ATTEMPT": sold.attempt}))
        return web.json_response({"id": sold.id})

    def _body(self, sold: SoldMachine) -> LoopbackAgents:
        installation, kind = installation_of(sold.name), sold.kind
        if (installation, kind) not in self._bodies:
            blobs = ObstoreBlobs.open(
                self._bucket, installation, options=dict(self._options), grants=GrantSettings(scope=False)
            )
            self._bodies[installation, kind] = LoopbackAgents(blobs, kind, self._seed)
        return self._bodies[installation, kind]

    def saved(self, sold: SoldMachine) -> bool:
        """Return True if the agent of the machine has committed a checkpoint."""
        return self._body(sold).saved(sold.id)

    def take(self, sold: SoldMachine) -> None:
        """Preempt the machine, without notice."""
        sold.taken_at = time.monotonic()
        self._body(sold).take(sold.id)

    async def _list(self, request: web.Request) -> web.Response:
        for body in self._bodies.values():
            await body.machines()  # raises what has broken an agent
        now, shown, asking = time.monotonic(), [], Installation(request.query["installation"])
        for sold in self.sold.values():
            late_s = LAG_S * uniform_draw(self._seed, "lag", sold.id)
            if now >= sold.born + late_s and now < sold.destroyed + late_s:
                state = "running" if now < sold.taken_at else "gone"
                where = {"region": sold.region, "created_at": sold.born_at.isoformat()}
                shown.append({"id": sold.id, "name": sold.name, "state": state} | where)
        running = frozenset(machine["id"] for machine in shown if machine["state"] == "running")
        self.listings[asking].append(Listed(at=now, caller=request.query["caller"], running=running))
        return web.json_response(shown)

    async def _destroy(self, request: web.Request) -> web.Response:
        sold = self.sold.get((await request.json())["id"])
        if sold is None or time.monotonic() >= sold.destroyed:
            return web.json_response({}, status=404)
        sold.destroyed = time.monotonic()
        with contextlib.suppress(Gone):  # nothing runs on what was bought by hand
            await self._body(sold).destroy(InstanceName(sold.id))
        return web.json_response({})

    def of(self, installation: Installation) -> list[SoldMachine]:
        """Return every machine that was ever sold to the installation."""
        return [machine for machine in self.sold.values() if attempt_of(installation, machine.name) is not None]

    def alive(self, installation: Installation) -> list[SoldMachine]:
        now = time.monotonic()
        return [machine for machine in self.of(installation) if machine.live(now)]

    def proven_absent_at(self, installation: Installation, attempt: str) -> float | None:
        """Return the time at which a broker could first prove the absence of the attempt's machines. That is the second
        consecutive listing of one process without them after their end. None: no process listed so often."""
        machines = [machine for machine in self.of(installation) if machine.attempt == attempt]
        ids, ended = {machine.id for machine in machines}, max(machine.ended for machine in machines)
        without: Counter[str] = Counter()
        for listed in self.listings[installation]:
            if listed.at >= ended:
                without[listed.caller] = 0 if listed.running & ids else without[listed.caller] + 1
                if without[listed.caller] == 2:
                    return listed.at
        return None

    def bill(self, installation: Installation) -> dict[str, Decimal]:
        """Return the charges of the cloud in dollars, by attempt."""
        now, usd = time.monotonic(), defaultdict[str, Decimal](Decimal)
        for sold in self.of(installation):
            usd[sold.attempt] += sold.usd(now)
        return usd


def installation_of(name: InstanceName) -> Installation:
    return Installation(name.split("-")[1])


# ------------------------------------------------------------------------------------------------------------ provider


class LoopbackProvider:
    """`ports.Provider` of the cloud at `url`; `state` is a folder of its own."""

    dropped: Mapping[str, int] = {}
    identity: str | None = None
    caps = Caps(
        spot=False, list_lag_s=LAG_S, teardown_s=1.0, boot_s=AGENT.boot_s, boot_deadline_s=300.0, trust="secure",
        self_stop="os_shutdown",
    )  # fmt: skip

    def __init__(self, url: str, installation: Installation, state: Path, name: str = NAME) -> None:
        self._url, self._installation, self.name = url, installation, name
        self._launchers = LauncherLocks(state / "launchers")
        self._session: aiohttp.ClientSession | None = None

    async def _ask(self, method: str, call: str, **request: Any) -> Any:
        self._session = self._session or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        try:
            async with self._session.request(method, f"{self._url}/cloud/{call}", **request) as answer:
                if answer.status == 404:
                    raise Gone(f"{call}: absent")
                if answer.status == 409:
                    raise NoCapacity(f"{call}: sold out")
                if answer.status == 429:
                    raise Throttled(f"{call}: 429", after_s=float(answer.headers["Retry-After"]))
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise OutcomeUnknown(f"{call}: {type(e).__name__}") from e

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        sold = await self._ask("GET", "offers", params={"installation": self._installation})
        price = Decimal(sold["usd_per_hour"])
        return [
            Offer(
                id=f"paper/paper/{region}/1x-l40s/on-demand", provider=self.name, cloud="paper", region=region,
                instance_type="1x-l40s", accelerator="l40s", gpus=1, gpu_memory_bytes=48 * GIB, vcpus=16,
                ram_bytes=96 * GIB, disk_bytes=200 * GIB, spot=False, usd_per_hour=price, available=True,
                emulated_on="cpu", emulated_vcpus=os.cpu_count() or 1, simulated=True, seen_at=datetime.now(UTC),
            )
            for region in sold["regions"]
        ]  # fmt: skip

    def launcher_id(self) -> str:
        return self._launchers.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return self._launchers.liveness(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        with self._launchers.creating(name):
            asked = {"name": name, "attempt": boot.env["GPUBROKER_ATTEMPT"], "region": offer.region}
            sold = await self._ask("POST", "create", json=asked)
        return [Handle(provider=self.name, id=sold["id"], name=name, region=offer.region)]

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        """Do nothing: the listing has all facts."""

    async def cancel(self, name: InstanceName) -> None:
        """Do nothing: a create is too short to be cancelled."""

    async def list(self) -> Sequence[Observed]:
        shown = await self._ask(
            "GET", "list", params={"installation": self._installation, "caller": self._launchers.id}
        )
        return [
            Observed(
                handle=Handle(
                    provider=self.name, id=machine["id"], name=InstanceName(machine["name"]), region=machine["region"],
                ),
                state=InstanceState(machine["state"]), accelerator="l40s", gpus=1, usd_per_hour=USD_PER_HOUR,
                created_at=datetime.fromisoformat(machine["created_at"]),
            )
            for machine in shown
        ]  # fmt: skip

    async def destroy(self, handle: Handle) -> None:
        await self._ask("POST", "destroy", json={"id": handle.id})

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        raise Rejected(f"{handle.name} is a machine on paper: nothing runs there")

    async def check(self) -> str | None:
        return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._launchers.close()
