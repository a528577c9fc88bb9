"""Changed keys of rented clouds: a new key of the same account works, a key of another account lists nothing."""

import asyncio
from pathlib import Path

import pytest

from broker.domain.errors import OutcomeUnknown
from broker.domain.offer import GpuAsk
from tests.clouds.warp import held
from tests.conformance.emulated_clouds import KINDS, EmulatedCloud, open_emulated_cloud
from tests.conformance.provider_laws import an_offer, listed, new_name
from tests.support.rig.virtual_time import run_in_virtual_time


async def exchange(world: EmulatedCloud, account: int) -> None:
    with held():
        await asyncio.to_thread(world.exchange_key, account)


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_is_not_absent_because_another_account_does_not_list_it(kind: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with open_emulated_cloud(kind, tmp_path) as world:
            provider, name, another = world.open(), new_name(), new_name()
            offer = await an_offer(provider)
            (handle,) = await provider.create(name, offer, world.boot_of(name))
            await exchange(world, 2)
            for again in (provider, world.open()):  # also after a restart
                for act in (
                    again.list(), again.destroy(handle), again.offers(GpuAsk()),
                    again.create(another, offer, world.boot_of(another)),
                ):  # fmt: skip
                    with pytest.raises(OutcomeUnknown, match=r"account\.json"):
                        await act
                assert "account" in (await again.check() or "")
            assert world.made(another) == 0
            assert world.running() == {name}
            await exchange(world, 1)
            assert await listed(provider, name) is not None
            await provider.destroy(handle)

    run_in_virtual_time(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_key_of_the_account_shows_its_machines(kind: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with open_emulated_cloud(kind, tmp_path) as world:
            provider, name = world.open(), new_name()
            (handle,) = await provider.create(name, await an_offer(provider), world.boot_of(name))
            await exchange(world, 1)
            for again in (provider, world.open()):
                assert await listed(again, name) is not None
            assert await provider.check() is None
            await provider.destroy(handle)

    run_in_virtual_time(story())
