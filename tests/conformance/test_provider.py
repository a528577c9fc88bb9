"""Contract of every provider, over this machine and the simulated market with both of its backends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.blobs import ObstoreBlobs
from broker.domain.errors import NoCapacity, OutcomeUnknown
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import BootSpec, InstanceState, Liveness
from broker.domain.job import Handle
from broker.domain.offer import Offer
from broker.ports import Provider
from providers.local.machine import MachineBackend
from providers.local.process_backend import ProcessBackend
from providers.local.process_marks import instances_with_processes
from providers.local.provider import LocalConfig, LocalProvider
from providers.simulated.config import Faults, SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from tests.conformance.provider_laws import (
    ALIVE,
    FAULT_LAWS,
    LAWS,
    OURS,
    THEIRS,
    Law,
    Trouble,
    an_offer,
    listed,
    new_name,
)
from tests.unit.providers.clocks import SteppedClock
from tests.unit.providers.waiting import until

PROGRAM = ("sleep", "1000")


@dataclass
class World:
    """One cloud; `open` returns another provider object for it, as another broker would have."""

    kind: str
    state: Path
    clock: SteppedClock = field(default_factory=SteppedClock)
    faults: Mapping[str, Any] = field(default_factory=dict)
    blobs: ObstoreBlobs = field(default_factory=lambda: ObstoreBlobs.open("memory://", OURS))
    opened: list[Provider] = field(default_factory=list)
    adopts = True
    shows_ended = False

    @property
    def reachable(self) -> bool:
        return self.real

    @property
    def real(self) -> bool:
        return self.kind != "simulated-virtual"

    def open(self, installation: Installation = OURS, **config: Any) -> Provider:
        provider: Provider
        if self.kind == "local":
            provider = LocalProvider(
                LocalConfig(), installation=installation, state=self.state, clock=self.clock, argv=PROGRAM
            )
        else:
            settled = SimulatedConfig(faults=Faults(**self.faults), sold_out=0.0, hazard_scale=0.0, **config)
            body: MachineBackend = VirtualBackend(self.blobs, self.clock, settled.virtual)
            if self.real:
                body = ProcessBackend(
                    self.state / "instances", provider="simulated", installation=installation, argv=PROGRAM
                )
            provider = SimulatedProvider(settled, body, installation=installation, state=self.state, clock=self.clock)
        self.opened.append(provider)
        return provider

    def boot_of(self, name: InstanceName) -> BootSpec:
        return BootSpec(env={"GPUBROKER_ATTEMPT": name[-13:]})

    def made(self, name: InstanceName) -> int | None:
        """Count the instance's folders; there is one at most."""
        if not self.real:
            return None
        folders = [f.name for f in (self.state / "instances").iterdir() if not f.name.startswith(".")]
        assert set(folders) <= {name}
        return len(folders)

    def never_made(self, name: InstanceName) -> Handle:
        return Handle(provider=self.kind.partition("-")[0], id=name, name=name)

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def arm(self, trouble: Trouble, offer: Offer | None = None) -> None:
        self.faults = {trouble: 1.0}

    def running(self) -> set[str]:
        """Return the names that have a living process, regardless of the provider."""
        return instances_with_processes((self.state / "instances").resolve()) if self.real else set()


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[..., World]:
    def make(kind: str, **faults: Any) -> World:
        return World(kind=kind, state=tmp_path / kind, faults=faults)

    return make


@pytest.fixture
async def tidy() -> AsyncIterator[Callable[[World], Awaitable[None]]]:
    """Yield a function that destroys all machines of a world, and require that none is left."""
    worlds: list[World] = []

    async def remember(world: World) -> None:
        worlds.append(world)

    yield remember
    for world in worlds:
        world.faults = {}
        if world.real:
            for installation in (OURS, THEIRS):
                provider = world.open(installation)
                for machine in await provider.list():
                    await provider.destroy(machine.handle)
        assert world.running() == set()
        for provider in world.opened:
            await provider.close()


KINDS = ["local", "simulated-real", "simulated-virtual"]
SIMULATED = KINDS[1:]


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, make_world: Callable[..., World], tidy: Any) -> World:
    world = make_world(request.param)
    await tidy(world)
    return world


@pytest.fixture(params=SIMULATED)
async def faulty(request: pytest.FixtureRequest, make_world: Callable[..., World], tidy: Any) -> Callable[..., World]:
    async def remember(made: World) -> World:
        await tidy(made)
        return made

    def make(**faults: Any) -> Awaitable[World]:
        return remember(make_world(request.param, **faults))

    return make  # type: ignore[return-value]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_provider_obeys_the_lifecycle_contract(world: World, law: Law) -> None:
    await law(world)


@pytest.mark.parametrize("law", FAULT_LAWS, ids=lambda law: law.__name__)
async def test_provider_obeys_the_contract_under_faults(faulty: Any, law: Law) -> None:
    await law(await faulty())


async def test_a_launcher_is_dead_only_when_proven(world: World) -> None:
    ours, other, name = world.open(), world.open(), new_name()
    assert await ours.launcher(ours.launcher_id(), name) is Liveness.DEAD
    assert await ours.launcher(other.launcher_id(), name) is Liveness.ALIVE
    await other.close()
    world.opened.remove(other)
    assert await ours.launcher(other.launcher_id(), name) is Liveness.DEAD
    for stranger in ("", "elsewhere.12345678.1.1.aa", "../" + ours.launcher_id()):
        assert await ours.launcher(stranger, name) is Liveness.UNKNOWN


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_machines_outlive_their_broker(kind: str, make_world: Callable[..., World], tidy: Any) -> None:
    world = make_world(kind)
    await tidy(world)
    first, name = world.open(), new_name()
    (handle,) = await first.create(name, await an_offer(first), world.boot_of(name))
    world.opened.remove(first)
    await first.close()
    second = world.open()
    assert [(o.handle, o.state) for o in await second.list()] == [(handle, InstanceState.RUNNING)]
    assert list(await second.create(name, await an_offer(second), world.boot_of(name))) == [handle]
    await second.destroy(handle)
    assert await second.list() == []


async def test_local_takes_one_job_at_a_time(make_world: Callable[..., World], tidy: Any) -> None:
    world = make_world("local")
    await tidy(world)
    provider, name = world.open(), new_name()
    offer = await an_offer(provider)
    assert offer.available
    (handle,) = await provider.create(name, offer, world.boot_of(name))
    assert not (await an_offer(provider)).available
    other = new_name()
    with pytest.raises(NoCapacity):
        await provider.create(other, offer, world.boot_of(other))
    await provider.destroy(handle)
    assert (await an_offer(provider)).available


# -------------------------------------------------------------------------------------------------- faults of a cloud


async def test_launcher_counts_as_alive_after_a_false_timeout(faulty: Any) -> None:
    """The launcher is alive after a lying timeout until the machine comes."""
    world = await faulty(lying_timeout=1.0, lying_delay_s=0.3)
    provider, name = world.open(), new_name()
    with pytest.raises(OutcomeUnknown):
        await provider.create(name, await an_offer(provider), world.boot_of(name))
    assert await provider.list() == []
    assert await provider.launcher(provider.launcher_id(), name) is Liveness.ALIVE
    await asyncio.sleep(0)  # the launcher begins to wait
    world.clock.advance(0.3)

    async def dead() -> bool:
        return await provider.launcher(provider.launcher_id(), name) is Liveness.DEAD

    await until("the launcher's end", dead)
    assert await listed(provider, name) is not None


async def test_listings_lag_no_longer_than_stated(faulty: Any) -> None:
    world = await faulty(list_lag_s=0.5)
    provider, names = world.open(), [new_name() for _ in range(6)]
    offer = await an_offer(provider)
    handles = [(await provider.create(name, offer, world.boot_of(name)))[0] for name in names]
    early = {o.handle.name for o in await provider.list()}
    world.clock.advance(provider.caps.list_lag_s)
    assert {o.handle.name for o in await provider.list()} == set(names)
    assert early < set(names)
    for handle in handles:
        await provider.destroy(handle)
    assert await provider.list()
    world.clock.advance(provider.caps.list_lag_s)
    assert await provider.list() == []


async def test_a_preempted_machine_is_gone_until_it_is_destroyed(faulty: Any) -> None:
    world = await faulty()
    provider, names = world.open(lifetimes_s=(0.2, 1000.0)), [new_name(), new_name()]
    offer = await an_offer(provider, spot=True)
    short, long = [(await provider.create(name, offer, world.boot_of(name)))[0] for name in names]
    world.clock.advance(0.2)

    async def gone() -> bool:
        return {o.handle: o.state for o in await provider.list()}[short] is InstanceState.GONE

    await until("the preemption", gone)
    assert world.running() <= {long.name}
    assert {o.handle: o.state for o in await provider.list()}[long] in ALIVE
    await provider.destroy(short)
    assert await listed(provider, names[0]) is None
