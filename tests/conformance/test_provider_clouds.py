"""Contract of every provider, over the rented clouds: their native halves against their APIs' emulators."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from broker.domain.errors import OutcomeUnknown
from broker.domain.instance import InstanceState, Liveness
from broker.domain.job import Handle
from tests.conformance.emulated_clouds import KINDS, open_emulated_cloud
from tests.conformance.provider_laws import (
    ALIVE,
    FAULT_LAWS,
    LAWS,
    Law,
    an_offer,
    destroy,
    is_absent,
    listed,
    more_nodes_than_the_caps_allow_are_rejected,
    new_name,
)
from tests.support.rig.virtual_time import run_in_virtual_time

ALL = [(law, kind) for law in (*LAWS, *FAULT_LAWS) for kind in KINDS]
SINGLE = ("runpod", "vast")
"""Clouds that cannot join several machines to one job."""


@pytest.mark.parametrize(
    ("law", "kind"),
    [one for one in ALL if one[0] is not more_nodes_than_the_caps_allow_are_rejected or one[1] in SINGLE],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_cloud_obeys_the_lifecycle_contract(kind: str, law: Law, tmp_path: Path) -> None:
    async def story() -> None:
        async with open_emulated_cloud(kind, tmp_path) as world:
            await law(world)

    run_in_virtual_time(story())


@pytest.mark.parametrize("kind", KINDS[:3])
def test_listings_lag_no_longer_than_stated(kind: str, tmp_path: Path) -> None:
    """A create waits until its machine is listed, and does not mistake a listed, destroyed machine for its own."""

    async def story() -> None:
        async with open_emulated_cloud(kind, tmp_path) as world:
            provider, name = world.open(), new_name()
            world.clouds.control.list_lag(world.kind, int(provider.caps.list_lag_s))
            world.clouds.control.teardown(world.kind, int(provider.caps.teardown_s))
            (handle,) = await provider.create(name, await an_offer(provider), world.boot_of(name))
            assert handle.name == name
            await provider.destroy(handle)
            assert not await is_absent(world, provider, name)
            assert world.running() == set()
            await world.pass_time(provider.caps.list_lag_s + provider.caps.teardown_s)
            assert await is_absent(world, provider, name)
            assert world.made(name) == 1

    run_in_virtual_time(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_machine_is_not_alive_and_is_destroyed(kind: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with open_emulated_cloud(kind, tmp_path) as world:
            provider, names = world.open(), [new_name(), new_name()]
            handles: list[Handle] = []
            for name in names:
                offer = await an_offer(provider, spot=provider.caps.spot)
                handles += await provider.create(name, offer, world.boot_of(name))
            short, long = handles
            await world.preempt(short)
            machine = await listed(provider, short.name)
            assert machine is None or machine.state not in ALIVE
            other = await listed(provider, long.name)
            assert other is not None
            assert other.state in ALIVE
            if not await is_absent(world, provider, short.name):
                await destroy(world, provider, short)
            assert world.running() == {long.name}
            assert world.clouds.bill().open(short.name) == []

    run_in_virtual_time(story())


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_create_ends_and_leaves_its_machine_under_its_name(kind: str, tmp_path: Path) -> None:
    """A cancelled create ends, and its machine keeps the name."""

    async def story() -> None:
        async with open_emulated_cloud(kind, tmp_path) as world:
            provider, other, name = world.open(), world.open(), new_name()
            offer = await an_offer(provider)
            world.clouds.world.boots.clear()
            launched_by = provider.launcher_id()
            create = asyncio.create_task(provider.create(name, offer, world.boot_of(name)))
            while (machine := await listed(other, name)) is None:  # noqa: ASYNC110 - the cloud tells nobody
                await asyncio.sleep(1)
            assert machine.state is InstanceState.STARTING or kind == "aws"
            assert await other.launcher(launched_by, name) is Liveness.ALIVE
            await other.cancel(name)
            with pytest.raises(OutcomeUnknown):
                await create
            assert await other.launcher(launched_by, name) is Liveness.DEAD
            await destroy(world, other, machine.handle)
            assert world.made(name) == 1

    run_in_virtual_time(story())


def test_machines_that_are_joined_bear_one_name_and_end_one_by_one(tmp_path: Path) -> None:
    """Lambda alone is tested: RunPod and Vast join no machines; AWS requires placement groups, which moto lacks."""

    async def story() -> None:
        async with open_emulated_cloud("lambda", tmp_path) as world:
            provider, name = world.open(), new_name()
            boot = replace(world.boot_of(name), nodes=2)
            handles = list(await provider.create(name, await an_offer(provider), boot))
            assert len({handle.id for handle in handles}) == 2
            assert {handle.name for handle in handles} == {name}
            assert [o.handle for o in await provider.list()] == handles
            await provider.destroy(handles[0])
            assert [o.handle for o in await provider.list()] == handles[1:]
            with pytest.raises(OutcomeUnknown):  # what is left is not filled up
                await provider.create(name, await an_offer(provider), boot)
            assert world.made(name) == 2
            await provider.destroy(handles[1])
            assert await provider.list() == []

    run_in_virtual_time(story())
