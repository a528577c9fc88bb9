"""Rules for every provider, real or simulated: `LAWS`, and `FAULT_LAWS` for clouds that can fail."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Literal, Protocol

import pytest

from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import AttemptId, Installation, InstanceName, base32, instance_name
from broker.domain.instance import BootSpec, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Provider

OURS, THEIRS = Installation("aaaa"), Installation("aaab")
ALIVE = {InstanceState.STARTING, InstanceState.RUNNING}
Trouble = Literal["throttled", "server_error", "no_capacity", "lost_reply", "wrong_machine"]


class World(Protocol):
    """One cloud's account; `open` returns another provider object for it, as another broker would have."""

    @property
    def kind(self) -> str: ...
    @property
    def adopts(self) -> bool:
        """Return True if a create under an existing name returns that machine; False: it raises OutcomeUnknown."""
        ...

    @property
    def reachable(self) -> bool:
        """Return True if the machines can be reached over SSH."""
        ...

    @property
    def shows_ended(self) -> bool:
        """Return True if listings still show destroyed machines, as GONE."""
        ...

    def open(self, installation: Installation = OURS) -> Provider: ...
    def boot_of(self, name: InstanceName) -> BootSpec: ...
    def made(self, name: InstanceName) -> int | None:
        """Return the number of machines ever created under the name; None if only the provider can count them."""
        ...

    def running(self) -> set[str]:
        """Return the names under which a machine computes, regardless of the provider."""
        ...

    def never_made(self, name: InstanceName) -> Handle:
        """Return the handle of a machine that never existed, with an id of the cloud's kind."""
        ...

    async def pass_time(self, seconds: float) -> None: ...
    def arm(self, trouble: Trouble, offer: Offer | None = None) -> None:
        """Arm a failure that starts with the next `open`. `offer`: the offer that is sold out."""
        ...


Law = Callable[[World], Awaitable[None]]


def new_name(installation: Installation = OURS) -> InstanceName:
    return instance_name(installation, AttemptId(base32(os.urandom(9), 13)))


async def an_offer(provider: Provider, *, spot: bool = False) -> Offer:
    """Return an offer, if possible one that is not reported as sold out."""
    offers = [o for o in await provider.offers(GpuAsk()) if o.spot == spot]
    return min(offers, key=lambda offer: offer.available is False)


async def listed(provider: Provider, name: InstanceName) -> Observed | None:
    found = [o for o in await provider.list() if o.handle.name == name]
    assert len(found) <= 1
    return found[0] if found else None


async def is_absent(world: World, provider: Provider, name: InstanceName) -> bool:
    machine = await listed(provider, name)
    return machine is None or (world.shows_ended and machine.state is InstanceState.GONE)


async def destroy(world: World, provider: Provider, handle: Handle) -> None:
    """Destroy a machine and wait until it is absent, for no longer than the caps state."""
    await provider.destroy(handle)
    patience = provider.caps.list_lag_s and provider.caps.list_lag_s + provider.caps.teardown_s
    while not await is_absent(world, provider, handle.name):
        assert patience > 0, f"{handle.name} is listed after its end for longer than the caps state"
        step = min(1.0, patience)
        patience -= step
        await world.pass_time(step)
        with suppress(Gone):
            await provider.destroy(handle)


# ---------------------------------------------------------------------------------------------------------------- laws


async def offers_are_sane(world: World) -> None:
    provider = world.open()
    offers = await provider.offers(GpuAsk())
    assert offers
    assert len({o.id for o in offers}) == len(offers)
    for offer in offers:
        assert offer.provider == provider.name
        assert offer.usd_per_hour > 0 or world.kind == "local"
        assert offer.simulated == provider.caps.simulated
        assert min(offer.vcpus, offer.ram_bytes, offer.gpu_memory_bytes, offer.billing_quantum_s) > 0
        assert min(offer.gpus, offer.disk_bytes) > 0 or world.kind == "local"
        assert offer.seen_at.tzinfo is not None
        if offer.spot:
            assert offer.on_demand_usd_per_hour is not None
            assert offer.usd_per_hour <= offer.on_demand_usd_per_hour
            assert provider.caps.spot
    assert all(reason and count > 0 for reason, count in provider.dropped.items())


async def offers_obey_the_ask(world: World) -> None:
    provider = world.open()
    offers = await provider.offers(GpuAsk())
    one = offers[0]
    narrowed = await provider.offers(GpuAsk(accelerators=(one.accelerator,), regions=(one.region,)))
    assert one.id in {o.id for o in narrowed}
    assert {(o.accelerator, o.region) for o in narrowed} == {(one.accelerator, one.region)}
    most = max(o.gpus for o in offers)
    assert {o.gpus for o in await provider.offers(GpuAsk(min_gpus=most))} == {most}
    assert await provider.offers(GpuAsk(accelerators=("no-such-gpu",))) == []


async def a_created_machine_is_listed_as_bought(world: World) -> None:
    provider = world.open()
    for spot in sorted({o.spot for o in await provider.offers(GpuAsk())}):
        name, offer = new_name(), await an_offer(provider, spot=spot)
        (handle,) = await provider.create(name, offer, world.boot_of(name))
        assert (handle.provider, handle.name) == (provider.name, name)
        machine = await listed(provider, name)
        assert machine is not None
        assert machine.handle == handle
        assert machine.state in ALIVE
        assert (machine.accelerator, machine.gpus) == (offer.accelerator, offer.gpus)
        assert machine.spot in {None, offer.spot}, "RunPod's REST v2 does not report it"


async def one_name_is_one_machine(world: World) -> None:
    provider, name = world.open(), new_name()
    offer = await an_offer(provider)
    tries = (provider.create(name, offer, world.boot_of(name)) for _ in range(4))
    replies: Sequence[object] = await asyncio.gather(*tries, return_exceptions=True)
    answers = [list(reply) for reply in replies if isinstance(reply, Sequence)]
    errors = [reply for reply in replies if isinstance(reply, BaseException)]
    machine = await listed(provider, name)
    assert machine is not None
    assert answers
    assert all(answer == [machine.handle] for answer in answers)
    if world.adopts:
        assert errors == []
        assert list(await provider.create(name, offer, world.boot_of(name))) == [machine.handle]
    else:
        assert all(isinstance(error, OutcomeUnknown) for error in errors), errors
        with pytest.raises(OutcomeUnknown):
            await world.open().create(name, offer, world.boot_of(name))
    assert [o.handle for o in await provider.list()] == [machine.handle]
    assert world.made(name) in (1, None)


async def destroyed_is_absent_and_then_gone(world: World) -> None:
    provider, name = world.open(), new_name()
    (handle,) = await provider.create(name, await an_offer(provider), world.boot_of(name))
    await destroy(world, provider, handle)
    assert world.running() == set()
    with pytest.raises(Gone):
        await provider.destroy(handle)


async def what_never_was_is_gone(world: World) -> None:
    provider, name = world.open(), new_name()
    with pytest.raises(Gone):
        await provider.destroy(world.never_made(name))


async def what_is_not_ours_is_neither_listed_nor_destroyed(world: World) -> None:
    ours, theirs, name = world.open(), world.open(THEIRS), new_name(THEIRS)
    offer = await an_offer(ours)
    (handle,) = await theirs.create(name, await an_offer(theirs), world.boot_of(name))
    assert await ours.list() == []
    lookalikes = [name, f"{new_name()}x", new_name().replace("gb-", "gbx-"), f"x{new_name()}", "../" + new_name(), ""]
    for lookalike in lookalikes:
        alike = InstanceName(lookalike)
        for machine_id in (alike, handle.id):
            with pytest.raises(Rejected):
                await ours.destroy(Handle(provider=ours.name, id=machine_id, name=alike, region=handle.region))
        with pytest.raises(Rejected):
            await ours.create(alike, offer, world.boot_of(name))
    machine = await listed(theirs, name)
    assert machine is not None
    assert machine.handle == handle
    assert machine.state in ALIVE
    assert world.running() <= {name}


async def more_nodes_than_the_caps_allow_are_rejected(world: World) -> None:
    provider, name = world.open(), new_name()
    assert not provider.caps.multi_node
    with pytest.raises(Rejected):
        await provider.create(name, await an_offer(provider), BootSpec(nodes=2))
    assert await provider.list() == []


async def strangers_are_not_known_to_be_dead(world: World) -> None:
    provider, name = world.open(), new_name()
    assert await provider.launcher(provider.launcher_id(), name) is Liveness.DEAD
    for stranger in ("", "elsewhere.12345678.1.1.aa", "../" + provider.launcher_id()):
        assert await provider.launcher(stranger, name) is Liveness.UNKNOWN


async def calling_off_what_is_not_under_way_does_no_harm(world: World) -> None:
    provider, name = world.open(), new_name()
    await provider.cancel(new_name())
    (handle,) = await provider.create(name, await an_offer(provider), world.boot_of(name))
    await provider.cancel(name)
    machine = await listed(provider, name)
    assert machine is not None
    assert (machine.handle, machine.state in ALIVE) == (handle, True)
    assert await provider.check() is None


async def a_machine_is_reached_while_it_stands(world: World) -> None:
    provider, name = world.open(), new_name()
    (handle,) = await provider.create(name, await an_offer(provider), world.boot_of(name))
    if not world.reachable:
        with pytest.raises(Rejected):
            await provider.reach(handle, ["id"], tty=False)
        return
    for command in (["id", "a b"], []):
        argv = list(await provider.reach(handle, command, tty=False))
        assert argv
        assert all(isinstance(word, str) for word in argv)
    await destroy(world, provider, handle)
    with pytest.raises((Gone, Rejected)):
        await provider.reach(handle, ["id"], tty=False)


LAWS: Sequence[Law] = (
    offers_are_sane,
    offers_obey_the_ask,
    a_created_machine_is_listed_as_bought,
    one_name_is_one_machine,
    destroyed_is_absent_and_then_gone,
    what_never_was_is_gone,
    what_is_not_ours_is_neither_listed_nor_destroyed,
    more_nodes_than_the_caps_allow_are_rejected,
    strangers_are_not_known_to_be_dead,
    calling_off_what_is_not_under_way_does_no_harm,
    a_machine_is_reached_while_it_stands,
)

# -------------------------------------------------------------------------------------------------- faults of a cloud


async def throttled_did_nothing(world: World) -> None:
    offer, name = await an_offer(world.open()), new_name()
    world.arm("throttled")
    provider = world.open()
    for call in (provider.offers(GpuAsk()), provider.create(name, offer, world.boot_of(name)), provider.list(),
                 provider.destroy(world.never_made(name))):  # fmt: skip
        with pytest.raises(Throttled):
            await call
    assert not world.made(name)


async def a_server_error_leaves_the_outcome_unknown(world: World) -> None:
    world.arm("server_error")
    provider = world.open()
    for call in (provider.offers(GpuAsk()), provider.list()):
        with pytest.raises(OutcomeUnknown):
            await call


async def sold_out_created_nothing(world: World) -> None:
    offer, name = await an_offer(world.open()), new_name()
    world.arm("no_capacity", offer)
    provider = world.open()
    with pytest.raises(NoCapacity):
        await provider.create(name, offer, world.boot_of(name))
    assert await provider.list() == []
    assert not world.made(name)


async def a_lost_reply_leaves_a_machine_under_its_name(world: World) -> None:
    offer, name = await an_offer(world.open()), new_name()
    world.arm("lost_reply")
    provider = world.open()
    with pytest.raises(OutcomeUnknown):
        await provider.create(name, offer, world.boot_of(name))
    machine = await listed(provider, name)
    assert machine is not None
    assert await provider.launcher(provider.launcher_id(), name) is Liveness.DEAD
    await destroy(world, provider, machine.handle)
    assert world.running() == set()


async def a_wrong_machine_shows_as_such(world: World) -> None:
    offer, name = await an_offer(world.open()), new_name()
    world.arm("wrong_machine", offer)
    provider = world.open()
    await provider.create(name, offer, world.boot_of(name))
    machine = await listed(provider, name)
    assert machine is not None
    assert machine.accelerator not in (None, offer.accelerator)


FAULT_LAWS: Sequence[Law] = (
    throttled_did_nothing,
    a_server_error_leaves_the_outcome_unknown,
    sold_out_created_nothing,
    a_lost_reply_leaves_a_machine_under_its_name,
    a_wrong_machine_shows_as_such,
)
