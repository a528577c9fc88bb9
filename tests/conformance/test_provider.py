"""What every provider must do. Run over this machine and the simulated market with both of its bodies."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.blobs import ObstoreBlobs
from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import AttemptId, Installation, InstanceName, base32, instance_name
from broker.domain.instance import BootSpec, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Provider
from providers.body import Body
from providers.born import born_into
from providers.local import LocalConfig, LocalProvider
from providers.processes import RealBody
from providers.sim_config import Faults, SimulatedConfig
from providers.sim_virtual import VirtualBody
from providers.simulated import SimulatedProvider
from tests.unit.providers.clocks import SteppedClock
from tests.unit.providers.waiting import until

OURS, THEIRS = Installation("aaaa"), Installation("aaab")
PROGRAM = ("sleep", "1000")
ALIVE = {InstanceState.STARTING, InstanceState.RUNNING}


def new_name(installation: Installation = OURS) -> InstanceName:
    return instance_name(installation, AttemptId(base32(os.urandom(9), 13)))


def boot_of(name: InstanceName) -> BootSpec:
    return BootSpec(env={"GPUBROKER_ATTEMPT": name[-13:]})


@dataclass
class World:
    """One cloud, and doors to it: `open` makes another provider object, as another broker would."""

    kind: str
    state: Path
    clock: SteppedClock = field(default_factory=SteppedClock)
    faults: Mapping[str, Any] = field(default_factory=dict)
    blobs: ObstoreBlobs = field(default_factory=lambda: ObstoreBlobs.open("memory://", OURS))
    opened: list[Provider] = field(default_factory=list)

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
            body: Body = VirtualBody(self.blobs, self.clock, settled.virtual)
            if self.real:
                body = RealBody(self.state / "instances", provider="simulated", installation=installation, argv=PROGRAM)
            provider = SimulatedProvider(settled, body, installation=installation, state=self.state, clock=self.clock)
        self.opened.append(provider)
        return provider

    def processes(self) -> set[str]:
        """Names that have a living process, whatever the provider says."""
        return born_into((self.state / "instances").resolve()) if self.real else set()


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[..., World]:
    def make(kind: str, **faults: Any) -> World:
        return World(kind=kind, state=tmp_path / kind, faults=faults)

    return make


@pytest.fixture
async def tidy() -> AsyncIterator[Callable[[World], Awaitable[None]]]:
    """Nothing of a world may be left when a test is over."""
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
        assert world.processes() == set()
        for provider in world.opened:
            await provider.close()


KINDS = ["local", "simulated-real", "simulated-virtual"]
SIMULATED = KINDS[1:]


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, make_world: Callable[..., World], tidy: Any) -> World:
    made = make_world(request.param)
    await tidy(made)
    return made


@pytest.fixture(params=SIMULATED)
async def faulty(request: pytest.FixtureRequest, make_world: Callable[..., World], tidy: Any) -> Callable[..., World]:
    async def remember(made: World) -> World:
        await tidy(made)
        return made

    def make(**faults: Any) -> Awaitable[World]:
        return remember(make_world(request.param, **faults))

    return make  # type: ignore[return-value]


async def an_offer(provider: Provider, *, spot: bool = False) -> Offer:
    return next(o for o in await provider.offers(GpuAsk()) if o.spot == spot)


async def listed(provider: Provider, name: InstanceName) -> Observed | None:
    found = [o for o in await provider.list() if o.handle.name == name]
    assert len(found) <= 1
    return found[0] if found else None


async def test_offers_are_sane(world: World) -> None:
    provider = world.open()
    offers = await provider.offers(GpuAsk())
    assert offers
    assert len({o.id for o in offers}) == len(offers)
    for offer in offers:
        assert offer.provider == provider.name
        assert offer.usd_per_hour > 0 or world.kind == "local"
        assert offer.simulated == provider.caps.simulated
        assert min(offer.vcpus, offer.ram_bytes, offer.gpu_memory_bytes, offer.billing_quantum_s) > 0
        assert offer.seen_at.tzinfo is not None
        if offer.spot:
            assert offer.on_demand_usd_per_hour is not None
            assert offer.usd_per_hour <= offer.on_demand_usd_per_hour
            assert provider.caps.spot
    one = offers[0]
    narrowed = await provider.offers(GpuAsk(accelerators=(one.accelerator,), regions=(one.region,)))
    assert one.id in {o.id for o in narrowed}
    assert {(o.accelerator, o.region) for o in narrowed} == {(one.accelerator, one.region)}
    assert await provider.offers(GpuAsk(accelerators=("no-such-gpu",))) == []


async def test_a_created_machine_is_listed_as_bought(world: World) -> None:
    provider, name = world.open(), new_name()
    offer = await an_offer(provider)
    (handle,) = await provider.create(name, offer, boot_of(name))
    assert (handle.provider, handle.name) == (provider.name, name)
    seen = await listed(provider, name)
    assert seen is not None
    assert seen.handle == handle
    assert seen.state in ALIVE
    assert (seen.accelerator, seen.gpus, seen.spot) == (offer.accelerator, offer.gpus, offer.spot)


async def test_one_name_is_one_machine(world: World) -> None:
    provider, name = world.open(), new_name()
    offer = await an_offer(provider)
    replies = await asyncio.gather(*(provider.create(name, offer, boot_of(name)) for _ in range(4)))
    again = await provider.create(name, offer, boot_of(name))
    assert all(list(reply) == list(again) for reply in replies)
    assert len(await provider.list()) == 1
    if world.real:
        assert [f.name for f in (world.state / "instances").iterdir() if not f.name.startswith(".")] == [name]


async def test_destroyed_is_absent_and_then_gone(world: World) -> None:
    provider, name = world.open(), new_name()
    (handle,) = await provider.create(name, await an_offer(provider), boot_of(name))
    await provider.destroy(handle)
    assert await listed(provider, name) is None
    assert world.processes() == set()
    with pytest.raises(Gone):
        await provider.destroy(handle)


async def test_what_never_was_is_gone(world: World) -> None:
    provider, name = world.open(), new_name()
    with pytest.raises(Gone):
        await provider.destroy(Handle(provider=provider.name, id=name, name=name))


async def test_what_is_not_ours_is_neither_listed_nor_destroyed(world: World) -> None:
    ours, theirs, name = world.open(), world.open(THEIRS), new_name(THEIRS)
    (handle,) = await theirs.create(name, await an_offer(theirs), boot_of(name))
    assert await ours.list() == []
    lookalikes = [name, f"{new_name()}x", new_name().replace("gb-", "gbx-"), f"x{new_name()}", "../" + new_name(), ""]
    for lookalike in lookalikes:
        alike = InstanceName(lookalike)
        with pytest.raises(Rejected):
            await ours.destroy(Handle(provider=ours.name, id=alike, name=alike))
        with pytest.raises(Rejected):
            await ours.create(alike, await an_offer(ours), boot_of(name))
    seen = await listed(theirs, name)
    assert seen is not None
    assert seen.handle == handle
    assert seen.state in ALIVE


async def test_more_nodes_than_a_machine_has_are_rejected(world: World) -> None:
    provider, name = world.open(), new_name()
    with pytest.raises(Rejected):
        await provider.create(name, await an_offer(provider), BootSpec(nodes=2))
    assert await provider.list() == []


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
    (handle,) = await first.create(name, await an_offer(first), boot_of(name))
    world.opened.remove(first)
    await first.close()
    second = world.open()
    assert [(o.handle, o.state) for o in await second.list()] == [(handle, InstanceState.RUNNING)]
    assert list(await second.create(name, await an_offer(second), boot_of(name))) == [handle]
    await second.destroy(handle)
    assert await second.list() == []


async def test_local_takes_one_job_at_a_time(make_world: Callable[..., World], tidy: Any) -> None:
    world = make_world("local")
    await tidy(world)
    provider, name = world.open(), new_name()
    offer = await an_offer(provider)
    assert offer.available
    (handle,) = await provider.create(name, offer, boot_of(name))
    assert not (await an_offer(provider)).available
    other = new_name()
    with pytest.raises(NoCapacity):
        await provider.create(other, offer, boot_of(other))
    await provider.destroy(handle)
    assert (await an_offer(provider)).available


# -------------------------------------------------------------------------------------------------- faults of a cloud


async def test_throttled_did_nothing(faulty: Any) -> None:
    provider, name = (await faulty(throttled=1.0)).open(), new_name()
    handle = Handle(provider=provider.name, id=name, name=name)
    offer = await an_offer((await faulty()).open())
    for call in (provider.offers(GpuAsk()), provider.create(name, offer, boot_of(name)), provider.list(),
                 provider.destroy(handle)):  # fmt: skip
        with pytest.raises(Throttled):
            await call


async def test_a_server_error_leaves_the_outcome_unknown(faulty: Any) -> None:
    provider = (await faulty(server_error=1.0)).open()
    for call in (provider.offers(GpuAsk()), provider.list()):
        with pytest.raises(OutcomeUnknown):
            await call


async def test_sold_out_created_nothing(faulty: Any) -> None:
    provider, name = (await faulty(no_capacity=1.0)).open(), new_name()
    with pytest.raises(NoCapacity):
        await provider.create(name, await an_offer(provider), boot_of(name))
    assert await provider.list() == []


async def test_a_lost_reply_leaves_a_machine_under_its_name(faulty: Any) -> None:
    provider, name = (await faulty(lost_reply=1.0)).open(), new_name()
    with pytest.raises(OutcomeUnknown):
        await provider.create(name, await an_offer(provider), boot_of(name))
    seen = await listed(provider, name)
    assert seen is not None
    assert await provider.launcher(provider.launcher_id(), name) is Liveness.DEAD
    await provider.destroy(seen.handle)
    assert await provider.list() == []


async def test_after_a_lying_timeout_the_launcher_is_alive_until_the_machine_comes(faulty: Any) -> None:
    world = await faulty(lying_timeout=1.0, lying_delay_s=0.3)
    provider, name = world.open(), new_name()
    with pytest.raises(OutcomeUnknown):
        await provider.create(name, await an_offer(provider), boot_of(name))
    assert await provider.list() == []
    assert await provider.launcher(provider.launcher_id(), name) is Liveness.ALIVE
    await asyncio.sleep(0)  # the launcher begins to wait
    world.clock.advance(0.3)

    async def dead() -> bool:
        return await provider.launcher(provider.launcher_id(), name) is Liveness.DEAD

    await until("the launcher's end", dead)
    assert await listed(provider, name) is not None


async def test_a_wrong_machine_shows_as_such(faulty: Any) -> None:
    provider, name = (await faulty(wrong_machine=1.0)).open(), new_name()
    offer = await an_offer(provider)
    await provider.create(name, offer, boot_of(name))
    seen = await listed(provider, name)
    assert seen is not None
    assert seen.accelerator not in (None, offer.accelerator)


async def test_listings_lag_no_longer_than_stated(faulty: Any) -> None:
    world = await faulty(list_lag_s=0.5)
    provider, names = world.open(), [new_name() for _ in range(6)]
    offer = await an_offer(provider)
    handles = [(await provider.create(name, offer, boot_of(name)))[0] for name in names]
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
    short, long = [(await provider.create(name, offer, boot_of(name)))[0] for name in names]
    world.clock.advance(0.2)

    async def gone() -> bool:
        return {o.handle: o.state for o in await provider.list()}[short] is InstanceState.GONE

    await until("the preemption", gone)
    assert world.processes() <= {long.name}
    assert {o.handle: o.state for o in await provider.list()}[long] in ALIVE
    await provider.destroy(short)
    assert await listed(provider, names[0]) is None
