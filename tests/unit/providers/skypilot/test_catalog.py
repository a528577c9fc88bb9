"""Rows of SkyPilot's catalog: merged rows, retained rows, and launches that wait for each other."""

import asyncio
import csv
from pathlib import Path

import pytest

from providers.skypilot import catalog as sky_catalog
from providers.skypilot.catalog import SkyCatalog

FILE = "runpod/vms.csv"


def row(kind: str = "1x_L40S_SECURE", *, spot: str = "0.31", zone: str = "US-GA-1") -> dict[str, str]:
    return {
        "InstanceType": kind, "AcceleratorName": "L40S", "AcceleratorCount": "1", "vCPUs": "4", "MemoryGiB": "48",
        "Price": "0.86", "SpotPrice": spot, "Region": "US", "AvailabilityZone": zone,
    }  # fmt: skip


def read(home: Path, file: str = FILE) -> list[dict[str, str]]:
    with (home / ".sky/catalogs/v8" / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


async def test_a_row_replaces_its_former_self_and_no_other(tmp_path: Path) -> None:
    catalog = SkyCatalog(tmp_path)
    async with catalog.holding({FILE: [row(), row(zone="US-TX-1")]}):
        pass
    async with catalog.holding({FILE: [row(spot="0.37")]}):
        found = {r["AvailabilityZone"]: r["SpotPrice"] for r in read(tmp_path)}
    assert found == {"US-GA-1": "0.37", "US-TX-1": "0.31"}
    assert not list((tmp_path / ".sky/catalogs/v8").rglob("*.md5")), "SkyPilot would take it for a download of its own"


async def test_catalog_rows_of_users_and_skypilot_stay(tmp_path: Path) -> None:
    path = tmp_path / ".sky/catalogs/v8" / FILE
    path.parent.mkdir(parents=True)
    path.write_text("InstanceType,Region,AvailabilityZone,Extra\nother,US,US-TX-1,kept\n")
    async with SkyCatalog(tmp_path).holding({FILE: [row()]}):
        found = read(tmp_path)
    assert [(r["InstanceType"], r["Extra"]) for r in found] == [("other", "kept"), ("1x_L40S_SECURE", "")]


async def test_a_value_with_commas_and_quotes_is_one_value(tmp_path: Path) -> None:
    place = 'Sweden, "SE", EU'
    async with SkyCatalog(tmp_path).holding({"vast/vms.csv": [row() | {"Region": place}]}):
        found = read(tmp_path, "vast/vms.csv")
    assert [r["Region"] for r in found] == [place]


async def test_images_are_keyed_by_tag_and_region(tmp_path: Path) -> None:
    catalog = SkyCatalog(tmp_path)
    for image in ("ami-1", "ami-2"):
        async with catalog.holding({"aws/images.csv": [{"Tag": "gpu", "Region": "us-east-1", "ImageId": image}]}):
            pass
    assert [r["ImageId"] for r in read(tmp_path, "aws/images.csv")] == ["ami-2"]


async def test_a_launch_at_another_price_waits_until_the_first_is_over(tmp_path: Path) -> None:
    catalog, first, order = SkyCatalog(tmp_path), asyncio.Event(), []

    async def second() -> None:
        async with catalog.holding({FILE: [row(spot="0.40")]}):
            order.append(("second", read(tmp_path)[0]["SpotPrice"]))

    async with catalog.holding({FILE: [row(spot="0.31")]}):
        waiting = asyncio.create_task(second())
        async with catalog.holding({FILE: [row(spot="0.31")]}), catalog.holding({FILE: [row(zone="US-TX-1")]}):
            order.append(("same price, or another place", read(tmp_path)[0]["SpotPrice"]))
        first.set()
        order.append(("first", next(r["SpotPrice"] for r in read(tmp_path) if r["AvailabilityZone"] == "US-GA-1")))
    await waiting
    assert [who for who, _ in order] == ["same price, or another place", "first", "second"]
    assert order[1][1] == "0.31"
    assert next(r["SpotPrice"] for r in read(tmp_path) if r["AvailabilityZone"] == "US-GA-1") == "0.40"


async def test_a_waiter_that_is_cancelled_holds_no_lock(tmp_path: Path) -> None:
    catalog = SkyCatalog(tmp_path)

    async def hold(spot: str) -> None:
        async with catalog.holding({FILE: [row(spot=spot)]}):
            pass

    async with catalog.holding({FILE: [row(spot="0.31")]}):
        waiting = asyncio.create_task(hold("0.40"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    async with asyncio.timeout(300):
        await hold("0.50")
    assert read(tmp_path)[0]["SpotPrice"] == "0.50"


async def test_the_oldest_rows_go_but_never_one_that_is_bought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_catalog, "_MAX_ROWS", 3)
    catalog = SkyCatalog(tmp_path)
    async with catalog.holding({FILE: [row("first")]}):
        for kind in ("second", "third", "fourth", "fifth"):
            async with catalog.holding({FILE: [row(kind)]}):
                pass
        kinds = [r["InstanceType"] for r in read(tmp_path)]
    assert kinds == ["first", "third", "fourth", "fifth"]
