"""Vast's raw rows: untrue, unsuitable and ending asks are counted by reason and cost no other ask."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import NOW
from tests.unit.providers.answers import serving
from tests.unit.providers.vast.test_provider import World, ask


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu_arch": "amd", "gpu_name": "MI300X", "gpu_ram": 196608}, {"not an NVIDIA GPU": 1}),
        ({"cpu_arch": "arm64"}, {"ARM processor: the image is for x86-64": 1}),
        ({"gpu_name": "GH200 SXM", "gpu_ram": 97871}, {"ARM processor: the image is for x86-64": 1}),
        ({"gpu_name": "A100 SXM4 MIG 3g.20gb", "gpu_ram": 19968}, {"share of a GPU": 1}),
        ({"num_gpus": 0.5}, {"share of a GPU": 1}),
        ({"num_gpus": 0}, {"no GPU": 1}),
        ({"gpu_name": "RTX 4090 Laptop", "gpu_ram": 16376}, {"laptop or workstation variant of a GPU": 1}),
        ({"duration": 180}, {"contract of the host ends within 5 min": 1}),
        ({"end_date": 1}, {"contract of the host ends within 5 min": 1}),
        ({"dph_base": -0.1, "min_bid": None}, {"price 0 or less": 1}),
        ({"dph_base": float("nan"), "min_bid": None}, {"price that is not a number": 1}),
    ],
)
async def test_unsuitable_rows_are_dropped_and_counted(
    tmp_path: Path, changes: dict[str, Any], why: dict[str, int]
) -> None:
    async with serving() as api:
        world = World(api, tmp_path)
        offers, dropped = await world.offers(ask(**changes), ask(id=2))
        assert ({offer.purchase["ask"] for offer in offers}, dropped) == ({"2"}, why)
        await world.clouds[0].close()


@pytest.mark.parametrize(
    ("changes", "days"),
    [
        ({"duration": 1800}, 0.02),
        ({"duration": 2 * 86_400}, 2),
        ({"duration": "172800", "end_date": None}, 2),
        ({"duration": 30 * 86_400, "end_date": (NOW + timedelta(days=3)).timestamp()}, 3),
        ({"duration": None, "end_date": (NOW + timedelta(days=4)).isoformat()}, 4),
        ({"duration": None, "end_date": None}, None),
        ({"duration": 1e15, "end_date": None}, None),
    ],
)
async def test_offers_end_with_the_hosts_contract(tmp_path: Path, changes: dict[str, Any], days: float | None) -> None:
    async with serving() as api:
        world = World(api, tmp_path)
        offers, dropped = await world.offers(ask(**changes))
        left_days = {offer.ends_at and round((offer.ends_at - NOW) / timedelta(days=1), 2) for offer in offers}
        assert (left_days, dropped) == ({days}, {})
        await world.clouds[0].close()


async def test_look_alike_gpus_keep_their_own_names(tmp_path: Path) -> None:
    async with serving() as api:
        world = World(api, tmp_path)
        rows = [("A100X", 81920), ("RTX A1000", 8188), ("RTX 4090D", 24564), ("RTX 6000Ada", 49140)]
        offers, dropped = await world.offers(
            *(ask(id=n, gpu_name=gpu, gpu_ram=mb, min_bid=None) for n, (gpu, mb) in enumerate(rows))
        )
        assert [offer.accelerator for offer in offers] == ["a100x", "rtx-a1000", "rtx-4090d", "rtx-6000-ada"]
        assert dropped == {}
        await world.clouds[0].close()
