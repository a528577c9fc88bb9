"""Simulated cloud, and each broker's connection to it, which loses, delays, doubles and refuses calls."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import AttemptId, InstanceName, attempt_of
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Attempt, AttemptState, Handle
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Clock
from providers.simulated.market import uniform_draw
from tests.sim.bodies import Body
from tests.sim.loop import EPOCH, Process
from tests.sim.measures import attempt_of_machine
from tests.sim.prices import BARE, KIND
from tests.support.memory_store.state import with_columns
from tests.support.rig.simulated_cloud import SimulatedCloud

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")
FOREIGN = ("gb-other-aaaaaaaaaaaaa", "gb-test-aaaa", "gb-test-aaaaaaaaaaaaa-2", "xgb-test-aaaaaaaaaaaaa", "gb-test")
"""Names of other owners' machines that look like ours."""
AGENT_START_S = 40.0
"""Seconds to the first heartbeat if launchers start the agents, as SkyPilot does by SSH; so it is with every second
seed.
"""
EARLY = (AttemptState.PLANNED, AttemptState.LAUNCHING)
SWEEPS: ContextVar[bool] = ContextVar("sweeps", default=False)
"""True in the sweep's task and in each destroy that the sweep begins."""


@dataclass(kw_only=True)
class MachineRecord:
    """True lifetime of one machine of ours, in virtual seconds."""

    id: str
    attempt: AttemptId
    usd_per_hour: Decimal
    born: float
    ended: float | None = None


class DrawnCloud(SimulatedCloud):
    """Cloud that sells several machines as one purchase and lists foreign machines. The seed draws its faults."""

    world: "World"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.terminated: dict[str, Observed] = {}
        """Destroyed machines, which every second cloud lists for an hour."""
        self.surplus: set[str] = set()
        """Surplus machines, which exist because the cloud carried out a create twice."""
        self._right = self._config
        starts = uniform_draw(self._config.seed, "launchers start agents") < 0.5
        self._caps = replace(
            super().caps, multi_node=True, trust="secure", boot_deadline_s=300.0,
            agent_start_s=AGENT_START_S if starts else None,
        )  # fmt: skip
        self._sells: tuple[int, Sequence[Offer]] = (-1, ())
        """Bucket of time and its offers; prices and stock are constant within a bucket."""
        self._lists_creation_time = uniform_draw(self._config.seed, "dates") >= 0.5
        """True: listings state the creation time of machines."""
        self._foreign = [
            Observed(
                handle=Handle(provider=self.name, id=f"foreign-{i}", name=InstanceName(name)),
                state=InstanceState.RUNNING,
            )
            for i, name in enumerate(FOREIGN)
        ]

    @property
    def caps(self) -> Caps:
        return self._caps

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        bucket = int(self._clock.monotonic() // self._config.price_bucket_s)
        if bucket != self._sells[0]:
            moves = self.world.prices.moves
            found = [replace(offer, price_moves=moves and offer.spot) for offer in await super().offers(ask)]
            self._sells = (bucket, self.world.moves.listed(found, bucket))
        return self._sells[1]

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if name not in self.world.late and any(one.startswith(name) for one in self.standing()):
            self.world.fail("one_machine_set", f"{name} was bought a second time while it stands")
        share = self.world.weather.strength("cloud.wrong_machine")
        wrong = self._config.faults.model_copy(update={"wrong_machine": share})
        self._config = self._right.model_copy(update={"faults": wrong})
        handles = list(await super().create(name, offer, replace(boot, nodes=1)))
        if uniform_draw(self._config.seed, "wrong machine", name) < share:
            self.world.struck("cloud.wrong_machine", name)
        for node in range(1, boot.nodes):
            if self.world.weather.hits("cloud.partial", job=self.world.job_of(name)):
                raise OutcomeUnknown(f"{name}: {node} of {boot.nodes} machines, then no more")
            handles.append(self._another(handles[0], node, offer))
        if name not in self.world.late and self.world.weather.hits("cloud.twice", job=self.world.job_of(name)):
            made = self._another(handles[0], boot.nodes, offer)
            self.surplus.add(made.id)
            self.world.watch.measures.unwanted(attempt_of_machine(made.id), [made.id], self.world.loop.time())
            handles += [made] if self.world.weather.draw("tells of both") < 0.5 else []
        return handles

    def _another(self, first: Handle, node: int, offer: Offer) -> Handle:
        handle = replace(first, id=f"{first.name}-{node}")
        if handle.id not in self.extra:
            self.world.body.stopped.pop(handle.id, None)
            self.add_machine(first, node, accelerator=offer.accelerator, gpus=offer.gpus, spot=offer.spot)
            self.world.watch.stands_up(handle.id)
            self.world.watch.billed(handle.id)
        return handle

    async def list(self) -> Sequence[Observed]:
        machines = await super().list()
        listed = {machine.handle.id for machine in machines}
        terminated = [machine for machine_id, machine in self.terminated.items() if machine_id not in listed]
        return [*machines, *terminated, *self._foreign]

    def as_listed(self, machine: Observed) -> Observed:
        extra = machine.handle.id in self.extra
        return self._priced(self._dated(self._halted(machine) if extra else machine))

    def _halted(self, machine: Observed) -> Observed:
        """Return a machine as stopped within a list lag if its host stopped it; the machine still bills."""
        stops = self._clock.monotonic() >= self.world.body.stopped.get(machine.handle.id, math.inf)
        return with_columns(machine, state=InstanceState.STOPPED) if stops else machine

    def _priced(self, machine: Observed) -> Observed:
        """Add prices to a listed machine, if spot prices move. Some listings of machines with a fixed price omit the
        disk.
        """
        attempt = self.world.backups.attempt(attempt_of_machine(machine.handle.id))
        if not self.world.prices.moves or attempt is None or machine.state is InstanceState.GONE:
            return machine
        offer = attempt.line.offer
        price = self.world.prices.at(offer, self.world.loop.time())
        if not offer.price_moves:
            return with_columns(machine, usd_per_hour=price * BARE)
        if price != offer.usd_per_hour:
            self.world.strikes.note(KIND, attempt.job_id)
        return with_columns(machine, usd_per_hour=price, price_moves=True)

    def _dated(self, machine: Observed) -> Observed:
        """Return the machine, with its creation time at every second cloud."""
        born = self.world.watch.born_at.get(machine.handle.id) if self._lists_creation_time else None
        if born is None:
            return machine
        return with_columns(machine, created_at=EPOCH + timedelta(seconds=born))

    async def destroy(self, handle: Handle) -> None:
        if handle.id.startswith("foreign") or attempt_of(self._installation, handle.name) is None:
            self.world.fail("foreign_untouched", f"destroy of {handle.name}")
        if uniform_draw(self._config.seed, "lists terminated") < 0.5 and handle.id in self.standing():
            self.terminated[handle.id] = Observed(handle=handle, state=InstanceState.GONE)
        extra = handle.id in self.extra
        if not extra and handle.id != handle.name:
            raise Gone(f"{handle.id} is not there")
        await super().destroy(handle)
        if extra:
            self.world.note("cloud", f"destroyed {handle.id}")
            self.world.watch.died(handle.id, self.world.loop.time())

    def has_owner(self, machine_id: str, own: Attempt) -> bool:
        """Return True if a live attempt owns the machine; a live attempt disowns surplus machines that it has not
        recorded.
        """
        recorded = {handle.id for handle in own.handles} if own.state not in EARLY else ()
        return own.live and not (recorded and machine_id in self.surplus - set(recorded))

    def standing(self) -> tuple[str, ...]:
        """Return ids of all machines of ours that bill."""
        body = self._backend
        assert isinstance(body, Body)
        return (*body.standing(), *self.extra)


@dataclass(kw_only=True, eq=False)
class Launch:
    """Create in progress at the cloud, which may outlive its caller."""

    name: InstanceName
    launched_by: str
    outlives: bool
    """True: the create continues when its caller dies."""
    unwanted: bool = False
    work: asyncio.Task[Sequence[Handle]] | None = None


class CloudConnection:
    """`ports.Provider` through the connection of one process."""

    name = "simulated"

    def __init__(self, world: "World", process: Process, clock: Clock, broker: int) -> None:
        self._world = world
        self.process = process
        self._clock = clock
        self._broker = broker

    @property
    def caps(self) -> Caps:
        return self._world.cloud.caps

    @property
    def identity(self) -> str | None:
        return None

    @property
    def dropped(self) -> Mapping[str, int]:
        return {}

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        found = await self._ask("offers", lambda: self._world.cloud.offers(ask))
        factor = Decimal(str(round(self._world.weather.strength("cloud.prices"), 2))) or Decimal(1)
        if factor != 1:
            self._world.strikes.note("cloud.prices")
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
        return self.process.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        if self._world.weather.hits("launcher.unknown", job=self._world.job_of(name)):
            return Liveness.UNKNOWN
        if self._world.launching(name, launched_by):
            return Liveness.ALIVE
        if launched_by == self.process.id or self._world.is_dead(launched_by):
            return Liveness.DEAD
        return Liveness.ALIVE

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        weather, job = self._world.weather, self._world.job_of(name)
        if self._world.launching(name):
            self._world.fail("create_once", f"{self.process.id} creates {name}, which is being created")
        launch = Launch(name=name, launched_by=self.process.id, outlives=weather.draw("outlives") < 0.5)
        self._world.launches.append(launch)
        self._world.note(self.process.id, f"create {name} {offer.id}")
        if weather.hits("people.stop_launch", job=job):
            self._world.spawn(self._world.people.stop(name), "stop")
        if weather.hits("kill.launching", job=job):
            self._world.spawn(self._world.happenings.die_launching(self.process), "kill")
        launch.work = self._world.spawn(self._launch(launch, offer, boot), f"launch {name}")
        await asyncio.wait([launch.work])
        return launch.work.result()

    async def _launch(self, launch: Launch, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        weather, world, job = self._world.weather, self._world, self._world.job_of(launch.name)
        try:
            await world.pause(0.2, 40.0 if weather.draw("takes long") < 0.2 else 3.0)
            await self._connect("create")
            self._refuse("create")
            if weather.hits("cloud.no_credit", job=job):
                raise Rejected("insufficient balance: add credit")
            if weather.hits("cloud.no_capacity", job=job):
                raise NoCapacity(f"{offer.id} is sold out")
            if weather.hits("cloud.slow_create", job=job):
                await world.pause(10.0, 250.0)
            if launch.unwanted or (self.process.dead and not launch.outlives):
                raise OutcomeUnknown(f"the launcher of {launch.name} died")
            handles = await self._create(launch, offer, boot)
            if weather.hits("cloud.short_life", job=job):
                self._world.spawn(self._world.happenings.die_young(launch.name), "short life")
            if weather.hits("cloud.slow_create", job=job):
                await world.pause(1.0, 60.0)
            self._lose("create")
            return handles
        finally:
            world.launches.remove(launch)

    async def _create(self, launch: Launch, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """Create a machine with its agent, if launchers start agents.

        A launcher that dies or is cancelled before leaves a machine that bills and does nothing.
        """
        world = self._world
        if world.cloud.caps.agent_start_s is None:
            return await world.cloud.create(launch.name, offer, boot)
        world.body.waits_for_launcher(launch.name)
        handles = await world.cloud.create(launch.name, offer, boot)
        await world.pause(3.0, AGENT_START_S / 2)
        if launch.unwanted or (self.process.dead and not launch.outlives):
            raise OutcomeUnknown(f"the launcher of {launch.name} died before it had started its agent")
        world.body.agent_started(launch.name)
        return handles

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        await self._ask("confirm", self._nothing)

    async def _nothing(self) -> None:
        """Return nothing beyond the listing."""

    async def cancel(self, name: InstanceName) -> None:
        await self._world.pause(0.1, 1.0)
        cancelled = [launch for launch in self._world.launches if launch.name == name]
        if cancelled and not self._world.weather.hits("cloud.deaf", job=self._world.job_of(name)):
            for launch in cancelled:
                launch.unwanted = True

    async def list(self) -> Sequence[Observed]:
        return await self._ask("list", self._world.cloud.list)

    async def destroy(self, handle: Handle) -> None:
        self._world.note(self.process.id, f"destroy {handle.id}")
        orphans = self._world.watch.orphans
        if SWEEPS.get():
            orphans.swept(handle.id)
        orphans.unanswered.add(handle.id)
        try:
            await self._ask("destroy", lambda: self._world.cloud.destroy(handle))
        except Gone:
            orphans.unanswered.discard(handle.id)
            raise
        orphans.unanswered.discard(handle.id)
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
        """Do nothing: simulated processes are killed, not closed."""

    async def _ask(self, call: str, effect: Callable[[], Awaitable[T]]) -> T:
        await self._connect(call)
        slow = self._world.weather.hits("cloud.slow")
        await self._world.pause(0.05, 14.0 if slow else 0.5)
        self._refuse(call)
        answer = await effect()
        await self._world.pause(0.01, 5.0 if slow else 0.3)
        self._lose(call)
        return answer

    async def _connect(self, call: str) -> None:
        """Let the call of a broker without a connection time out; the broker gets no other sign of the outage."""
        if self._world.weather.hits("cloud.cut", self._broker):
            await self._world.pause(5.0, 20.0)
            raise OutcomeUnknown(f"{call}: no connection")

    def _refuse(self, call: str) -> None:
        weather = self._world.weather
        if weather.hits("cloud.429"):
            raise Throttled(f"{call}: 429", after_s=1.0)
        if weather.hits("cloud.refuses"):
            raise Rejected(f"{call}: 401 unauthorized: the key has expired")
        if weather.hits("cloud.down") or weather.hits("cloud.5xx"):
            raise OutcomeUnknown(f"{call}: 503")

    def _lose(self, call: str) -> None:
        if self._world.weather.hits("cloud.lost_reply"):
            raise OutcomeUnknown(f"{call}: the reply was lost")
