"""Vast's asks in unusual forms: each is sold as what it is, or dropped by a true reason."""

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.unit.providers.answers import serving
from tests.unit.providers.vast.test_provider import World, ask


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with serving() as api:
        world = World(api, tmp_path)
        yield world
        for cloud in world.clouds:
            await cloud.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"duration": "180"}, "contract of the host ends within 5 min"),
        ({"duration": None, "end_date": "1"}, "contract of the host ends within 5 min"),
        ({"end_date": "2020-01-01T00:00:00Z"}, "contract of the host ends within 5 min"),
        ({"end_date": 1_577_836_800_000}, "contract of the host ends within 5 min"),  # 2020 in milliseconds
        ({"end_date": "next year"}, "end of the host's contract that cannot be read"),
        ({"duration": 9e6, "end_date": "?"}, "end of the host's contract that cannot be read"),
        ({"rentable": False}, "not for rent"),
        ({"rented": "true"}, "not for rent"),
        ({"external": True}, "not for rent"),
        ({"verification": "unverified"}, "not verified by Vast"),
        ({"verification": "deverified"}, "not verified by Vast"),
        ({"reliability2": None}, "reliability that is no share"),
        ({"reliability2": float("nan")}, "reliability that is no share"),
        ({"reliability2": 99.3}, "reliability that is no share"),
        ({"reliability2": "0.62"}, "reliability below 0.9"),
        ({"cuda_max_good": "12.2"}, "driver older than CUDA 12.4"),
        ({"cuda_max_good": 12}, "driver older than CUDA 12.4"),
        ({"cuda_max_good": None}, "unreadable"),
        ({"cuda_max_good": float("nan")}, "unreadable"),
        ({"storage_total_cost": -1}, "unreadable"),
        ({"storage_total_cost": None, "storage_cost": None}, "unreadable"),
        ({"storage_cost": -0.1}, "unreadable"),
        ({"storage_cost": float("nan")}, "unreadable"),
        ({"inet_down_cost": -5}, "unreadable"),
        ({"inet_up_cost": float("nan")}, "unreadable"),
        ({"cpu_ram": float("nan")}, "unreadable"),
        ({"cpu_cores_effective": None}, "unreadable"),
        ({"id": None}, "unreadable"),
        ({"id": [1]}, "unreadable"),
        ({"id": "abc"}, "unreadable"),
        ({"num_gpus": True}, "no GPU"),
        ({"reliability2": None, "reliability": 0.6}, "reliability below 0.9"),
        ({"gpu_name": ""}, "GPU without a name"),
        ({"num_gpus": "0.5"}, "share of a GPU"),
        ({"geolocation": "Germany"}, "no country"),
        ({"geolocation": 49}, "no country"),
        ({"dph_base": True, "min_bid": None}, "price that is not a number"),
        ({"dph_base": {}, "min_bid": None}, "price that is not a number"),
    ],
)
async def test_untrue_values_cost_their_ask_alone(world: World, changes: dict[str, Any], why: str) -> None:
    offers, dropped = await world.offers(ask(**changes), ask(id=2))
    assert ({offer.purchase["ask"] for offer in offers}, set(dropped)) == ({"2"}, {why})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_gpus": "1"}, {"gpu_ram": "24564"}, {"gpu_ram": 24564.0}, {"cpu_ram": "257000"}, {"cpu_cores": "64"},
        {"cpu_cores_effective": "16.0"}, {"dph_base": "0.40"}, {"min_bid": "0.20"}, {"reliability2": "0.993"},
        {"reliability2": None, "reliability": 0.993}, {"cpu_arch": ""}, {"gpu_arch": " "}, {"cpu_arch": "unknown"},
        {"cuda_max_good": "12.6"}, {"disk_bw": "3100.5"}, {"inet_down": "905.0"}, {"inet_down_cost": "0.002"},
        {"storage_cost": "0.10"}, {"disk_space": "800.0"},
        {"storage_total_cost": "0.0139"}, {"id": "9001"}, {"machine_id": "1234"}, {"geolocation": "Bavaria, DE "},
        {"rented": "false"}, {"rentable": "true"}, {"datacenter": "false"}, {"hosting_type": "0"}, {"bw_nvlink": None},
        {"duration": "9000000"}, {"end_date": None}, {"end_date": "2099-01-01T00:00:00+00:00"}, {"gpu_arch": "NVIDIA"},
    ],
)  # fmt: skip
async def test_numbers_as_texts_give_the_same_offers(world: World, changes: dict[str, Any]) -> None:
    plain, _ = await world.offers(ask())
    odd, dropped = await world.offers(ask(**changes))
    assert dropped == {}
    assert [
        (o.id, o.usd_per_hour, o.gpus, o.vcpus, o.ram_bytes, o.trust, o.facts, o.purchase, o.larger_disk) for o in odd
    ] == [
        (o.id, o.usd_per_hour, o.gpus, o.vcpus, o.ram_bytes, o.trust, o.facts, o.purchase, o.larger_disk) for o in plain
    ]


@pytest.mark.parametrize("field", ["disk_bw", "inet_up", "inet_down"])
@pytest.mark.parametrize("value", [None, 0, -1, "", "fast", float("nan"), float("inf"), True, []])
async def test_speeds_that_are_not_measured_are_unknown(world: World, field: str, value: object) -> None:
    name = {"disk_bw": "disk_mb_s", "inet_up": "up_mbit_s", "inet_down": "down_mbit_s"}[field]
    (offer, _), _ = await world.offers(ask(**{field: value}))
    assert getattr(offer.facts, name) is None


async def test_asks_without_a_host_share_no_history(world: World) -> None:
    offers, _ = await world.offers(ask(id=1, machine_id=None), ask(id=2, machine_id=""))
    assert len({offer.host_key for offer in offers}) == 4


async def test_asks_listed_twice_are_sold_once_at_the_latest_answer(world: World) -> None:
    offers, _ = await world.offers(ask(min_bid=None), ask(id="9001", min_bid=None), ask(id=2, min_bid=None))
    assert sorted(offer.purchase["ask"] for offer in offers) == ["2", "9001"]


async def test_a_disk_without_a_price_of_its_own_is_free(world: World) -> None:
    (fixed, _), _ = await world.offers(ask(storage_total_cost=0))
    assert fixed.usd_per_hour == Decimal("0.40")
