"""The cloud of the simulation: the simulated market and its virtual machines, with the truth on record, and each
broker's own door to it, at which calls get lost, late, doubled and refused."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from broker.domain.errors import BlobError, Gone, NoCapacity, OutcomeUnknown, Throttled
from broker.domain.ids import AttemptId, InstanceName, attempt_of
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Clock
from providers.body import Machine
from providers.sim_virtual import VirtualBody, _Instance
from providers.simulated import SimulatedProvider
from tests.sim.loop import Process
from trainer.contract import keys
from trainer.contract.rendezvous import AttemptSpec, Beat, Manifest, Outcome

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")
FOREIGN = ("gb-other-aaaaaaaaaaaaa", "gb-test-aaaa", "gb-test-aaaaaaaaaaaaa-2", "xgb-test-aaaaaaaaaaaaa", "gb-test")
"""Somebody else's machines, whose names look like ours."""


@dataclass(kw_only=True)
class Stand:
    """One machine of ours, as it truly stood; virtual seconds."""

    name: InstanceName
    attempt: AttemptId
    usd_per_hour: Decimal
    born: float
    ended: float | None = None


class Body(VirtualBody):
    """Knows the dead-man's switch, and agents that fall silent."""

    world: "World"
    silent: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.silent = set()
        self._called: dict[str, float] = {}
        self._lease: dict[str, tuple[bytes | None, float]] = {}

    def standing(self) -> list[InstanceName]:
        """Machines that run, and bill, now."""
        now = self._clock.monotonic()
        return [one.machine.name for one in self._instances.values() if not one.over and now < one.dies_at]

    def preempt(self, name: str, notice_s: float, *, told: bool = True) -> None:
        """`told`: False takes it away then without a word."""
        one, now = self._instances[name], self._clock.monotonic()
        if told:
            self._called[name] = now
            one.machine = replace(one.machine, notice_s=max(notice_s, one.machine.notice_s))
        one.dies_at = min(one.dies_at, now + notice_s)

    def told_s(self, one: _Instance) -> float:
        """For how long its listing told of its death before it came."""
        return one.dies_at - max(one.born, one.dies_at - one.machine.notice_s, self._called.get(one.machine.name, 0.0))

    async def start(self, machine: Machine, boot: BootSpec) -> Handle:
        new = machine.name not in self._instances
        handle = await super().start(machine, boot)
        if new:
            self.world.born(machine)
        return handle

    async def destroy(self, name: InstanceName) -> None:
        known = name in self._instances
        await super().destroy(name)
        if known:
            self.world.destroyed(name)

    async def _wake(self, name: str) -> None:
        one = self._instances.get(name)
        if name in self.silent and one is not None and not one.over:
            now = self._clock.monotonic()
            one.over = now >= one.dies_at
            if not one.over:
                heapq.heappush(self._due, (min(now + self._config.beat_s, one.dies_at), name))
        else:
            await super()._wake(name)
        if one is not None and one.over:
            self.world.over(name)

    async def _obey(self, instance: _Instance, spec: AttemptSpec, step: int) -> None:
        await super()._obey(instance, spec, step)
        if not instance.over and await self._broker_is_gone(instance, spec):
            await self._save(instance, spec, step)
            await self._finish(instance, Outcome.DEADMAN, step, "the broker's lease is stale")

    async def _broker_is_gone(self, instance: _Instance, spec: AttemptSpec) -> bool:
        now, data = self._clock.monotonic(), await self._blobs.get(keys.BROKER_LEASE)
        known = self._lease.get(instance.machine.name)
        if known is None or known[0] != data:
            self._lease[instance.machine.name] = (data, now)
            return False
        return now - known[1] > spec.limits.deadman_s

    async def haunt(self, name: str, for_s: float) -> None:
        """A machine that goes on after its destruction: beats, saves, and wants the last word."""
        one = self._instances.get(name)
        if one is None or one.spec is None:
            return
        until, spec, step = self._clock.monotonic() + for_s, one.spec, 0
        while self._clock.monotonic() < until:
            await self._clock.sleep(self._config.beat_s)
            if not one.over:
                continue
            step = max(step, one.saved.step if one.saved else 0) + 1
            try:
                beat = Beat(attempt=one.attempt, boot=one.boot, seq=10_000 + step, phase="training", step=step)
                await self._blobs.put(keys.beat(one.attempt, 0), beat.model_dump_json().encode())
                folder = keys.checkpoint(spec.job, one.attempt, min(step, self._config.steps - 1), f"{one.boot}{step}")
                manifest = Manifest(job=spec.job, attempt=one.attempt, step=step, kind="script", files=())
                await self._blobs.put(folder + keys.MANIFEST, manifest.model_dump_json().encode())
            except BlobError:
                continue


class Cloud(SimulatedProvider):
    """Sells several machines as one, and lists machines of others beside ours."""

    world: "World"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.more: dict[str, Observed] = {}
        """All but the first machine of several, by id."""
        self._right = self._config
        self._caps = replace(super().caps, multi_node=True, trust="secure", boot_deadline_s=300.0)
        self._sells: tuple[int, Sequence[Offer]] = (-1, ())
        """Prices and stock stand still within a bucket of time."""

    @property
    def caps(self) -> Caps:
        return self._caps

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        bucket = int(self._clock.monotonic() // self._config.price_bucket_s)
        if bucket != self._sells[0]:
            self._sells = (bucket, await super().offers(ask))
        return self._sells[1]

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        wrong = self._config.faults.model_copy(
            update={"wrong_machine": self.world.weather.strength("cloud.wrong_machine")}
        )
        self._config = self._right.model_copy(update={"faults": wrong})
        handles = list(await super().create(name, offer, replace(boot, nodes=1)))
        for node in range(1, boot.nodes):
            handle = replace(handles[0], id=f"{name}-{node}")
            shown = Observed(
                handle=handle, state=InstanceState.RUNNING, accelerator=offer.accelerator, gpus=offer.gpus,
                spot=offer.spot,
            )  # fmt: skip
            if handle.id not in self.more:
                self.more[handle.id] = shown
                self.world.watch.stands_up(handle.id)
            handles.append(handle)
        return handles

    async def list(self) -> Sequence[Observed]:
        foreign = [
            Observed(
                handle=Handle(provider=self.name, id=f"foreign-{i}", name=InstanceName(name)),
                state=InstanceState.RUNNING,
            )
            for i, name in enumerate(FOREIGN)
        ]
        return [*await super().list(), *self.more.values(), *foreign]

    async def destroy(self, handle: Handle) -> None:
        if handle.id.startswith("foreign") or attempt_of(self._installation, handle.name) is None:
            self.world.fail("foreign_untouched", f"destroy of {handle.name}")
        if handle.id in self.more:
            del self.more[handle.id]
            self.world.note("cloud", f"destroyed {handle.id}")
            self.world.watch.measures.gone(handle.id, self.world.loop.time())
            return
        await super().destroy(handle)

    def standing(self) -> tuple[str, ...]:
        """Ids of all machines of ours that bill."""
        body = self._body
        assert isinstance(body, Body)
        return (*body.standing(), *self.more)


@dataclass(kw_only=True, eq=False)
class Launch:
    """A create that is under way at the cloud's side, whatever became of who asked for it."""

    name: InstanceName
    launched_by: str
    outlives: bool
    """It goes on when its client dies."""
    unwanted: bool = False


class CloudDoor:
    """`ports.Provider` of one process."""

    name = "simulated"

    def __init__(self, world: "World", process: Process, clock: Clock, broker: int) -> None:
        self._world = world
        self._process = process
        self._clock = clock
        self._broker = broker
        self._lied: dict[str, int] = {}
        """How many listings have to show a machine before one may leave it out."""

    @property
    def caps(self) -> Caps:
        return self._world.cloud.caps

    @property
    def dropped(self) -> Mapping[str, int]:
        return {}

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        found = await self._ask("offers", lambda: self._world.cloud.offers(ask))
        factor = Decimal(str(round(self._world.weather.strength("cloud.prices"), 2))) or Decimal(1)
        now = self._clock.now()
        return [
            replace(
                offer,
                usd_per_hour=offer.usd_per_hour * factor,
                on_demand_usd_per_hour=(offer.on_demand_usd_per_hour or offer.usd_per_hour) * factor,
                seen_at=now,
            )
            for offer in found
        ]

    def launcher_id(self) -> str:
        return self._process.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        if self._world.weather.hits("launcher.unknown"):
            return Liveness.UNKNOWN
        if self._world.launching(name, launched_by):
            return Liveness.ALIVE
        if launched_by == self._process.id or self._world.is_dead(launched_by):
            return Liveness.DEAD
        return Liveness.ALIVE

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        weather = self._world.weather
        if self._world.launching(name):
            self._world.fail("create_once", f"{self._process.id} creates {name}, which is being created")
        launch = Launch(name=name, launched_by=self._process.id, outlives=weather.draw("outlives") < 0.5)
        self._world.launches.append(launch)
        self._world.note(self._process.id, f"create {name} {offer.id}")
        if weather.hits("people.stop_launch"):
            self._world.spawn(self._world.people.stop(name), "stop")
        task = self._world.spawn(self._launch(launch, offer, boot), f"launch {name}")
        await asyncio.wait([task])
        handles: Sequence[Handle] = task.result()
        return handles

    async def _launch(self, launch: Launch, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        weather, world = self._world.weather, self._world
        try:
            await world.pause(0.2, 40.0 if weather.draw("takes long") < 0.2 else 3.0)
            self._refuse("create")
            if weather.hits("cloud.no_capacity"):
                raise NoCapacity(f"{offer.id} is sold out")
            if weather.hits("cloud.slow_create"):
                await world.pause(10.0, 250.0)
            if launch.unwanted or (self._process.dead and not launch.outlives):
                raise OutcomeUnknown(f"the launcher of {launch.name} died")
            handles = await world.cloud.create(launch.name, offer, boot)
            if weather.hits("cloud.slow_create"):
                await world.pause(1.0, 60.0)
            self._lose("create")
            return handles
        finally:
            world.launches.remove(launch)

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        await self._ask("confirm", self._nothing)

    async def _nothing(self) -> None:
        """The listing says all."""

    async def cancel(self, name: InstanceName) -> None:
        await self._world.pause(0.1, 1.0)
        if not self._world.weather.hits("cloud.deaf"):
            for launch in self._world.launches:
                launch.unwanted = launch.unwanted or launch.name == name

    async def list(self) -> Sequence[Observed]:
        shown = await self._ask("list", self._world.cloud.list)
        share = 0.5 if self._world.weather.hits("cloud.list_omits") else self._world.blinks
        kept = []
        for one in shown:
            # Never in two listings in a row, which would be more than a listing that lags; nor in two with one between
            # them, which may be the gate's own look whether the cloud is back, and which nobody else sees.
            owed = self._lied.get(one.handle.id, 0)
            if not owed and self._world.sometimes(share):
                self._lied[one.handle.id] = 2
            else:
                self._lied[one.handle.id] = max(0, owed - 1)
                kept.append(one)
        return kept

    async def destroy(self, handle: Handle) -> None:
        self._world.note(self._process.id, f"destroy {handle.id}")
        await self._ask("destroy", lambda: self._world.cloud.destroy(handle))
        if self._world.weather.hits("cloud.duplicate"):
            self._world.spawn(self._late(handle), "duplicate")

    async def _late(self, handle: Handle) -> None:
        await self._world.pause(0.1, 30.0)
        try:
            await self._world.cloud.destroy(handle)
        except Gone:
            return

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        return await self._world.cloud.reach(handle, command, tty=tty)

    async def check(self) -> str | None:
        return None

    async def close(self) -> None:
        """Processes here are killed, not closed."""

    async def _ask(self, call: str, effect: Callable[[], Awaitable[T]]) -> T:
        slow = self._world.weather.hits("cloud.slow")
        await self._world.pause(0.05, 14.0 if slow else 0.5)
        self._refuse(call)
        answer = await effect()
        await self._world.pause(0.01, 5.0 if slow else 0.3)
        self._lose(call)
        return answer

    def _refuse(self, call: str) -> None:
        weather = self._world.weather
        if weather.hits("cloud.429"):
            raise Throttled(f"{call}: 429", after_s=1.0)
        if weather.hits("cloud.down") or weather.hits("cloud.5xx"):
            raise OutcomeUnknown(f"{call}: 503")

    def _lose(self, call: str) -> None:
        if self._world.weather.hits("cloud.lost_reply"):
            raise OutcomeUnknown(f"{call}: the reply was lost")
