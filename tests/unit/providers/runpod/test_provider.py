"""RunPod by its own API: places with live prices as offers, bids that SkyPilot cannot mistake, states mapped whole."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path

import pytest

from broker.domain.instance import BootSpec
from broker.domain.offer import GIB
from providers.runpod.gpu_types import SKY_NAMES
from providers.runpod.market import DISK_USD_PER_HOUR, country
from tests.support.skypilot import run_in_skypilot
from tests.unit.providers.runpod.shop import (
    H100,
    NAME,
    RTX4090,
    Shop,
    gpu,
    price,
    shop,
)

__all__ = ["shop"]


async def test_each_place_is_sold_on_demand_and_by_bid(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, 0.30))
    shop.sell(RTX4090, 4, "EU-RO-1", price(0.69, 0.35, stock="Low"))
    offers, dropped = await shop.offers(restart_s=600)
    assert dropped == {}
    assert set(offers) == {
        "runpod/runpod/US-TX-1/1x_RTX4090_SECURE/on-demand", "runpod/runpod/US-TX-1/1x_RTX4090_SECURE/spot",
        "runpod/runpod/EU-RO-1/4x_RTX4090_SECURE/on-demand", "runpod/runpod/EU-RO-1/4x_RTX4090_SECURE/spot",
    }  # fmt: skip
    one = offers["runpod/runpod/US-TX-1/1x_RTX4090_SECURE/on-demand"]
    assert (one.region, one.accelerator, one.gpus, one.gpu_memory_bytes) == ("US", "rtx4090", 1, 24 * 10**9)
    assert one.usd_per_hour == Decimal("0.69") + DISK_USD_PER_HOUR
    assert (one.vcpus, one.ram_bytes, one.trust, one.available) == (8, 62 * GIB, "secure", True)
    four = offers["runpod/runpod/EU-RO-1/4x_RTX4090_SECURE/spot"]
    # Prices are per GPU: 0.35 (1 + 0.05 log(600 / 3600 / 0.05)) = 0.37107, rounded up, four times.
    assert four.usd_per_hour == 4 * Decimal("0.372") + DISK_USD_PER_HOUR
    assert four.on_demand_usd_per_hour == 4 * Decimal("0.69") + DISK_USD_PER_HOUR
    assert (four.vcpus, four.ram_bytes) == (16, 96 * GIB)
    assert four.facts is not None
    assert four.facts.interconnect == "pcie"


async def test_a_larger_container_disk_is_bought_at_its_price(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, 0.30))
    offers, _ = await shop.offers()
    larger = offers["runpod/runpod/US-TX-1/1x_RTX4090_SECURE/spot"].with_disk(720 * 10**9)
    purchase = shop.clouds[-1].purchase(larger, BootSpec())
    assert purchase.disk_gb == 720
    assert larger.added_disk_usd_per_hour == pytest.approx(Decimal("0.10") * 620 / 720, abs=Decimal("0.0002"))
    (row,) = purchase.catalog["runpod/vms.csv"]
    assert row["SpotPrice"] == "0.319", "the bid is for the GPU alone"


def test_the_disk_price_is_hourly() -> None:
    """100 GB at $0.10 a month of 720 h."""
    assert pytest.approx(0.10 * 100 / 720, abs=1e-6) == float(DISK_USD_PER_HOUR)


async def test_no_stock_is_reported(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, None, stock=None))
    offers, _ = await shop.offers()
    assert [o.available for o in offers.values()] == [False]


async def test_impossible_and_unbuyable_offers_are_counted(shop: Shop) -> None:
    shop.types.append(gpu("Tesla V100-PCIE-16GB", 16))
    shop.types.append(gpu("NVIDIA L40S", 480))
    shop.sell(RTX4090, 1, "US-TX-1", price(0.0, 0.0))
    shop.sell(H100, 1, "US-TX-1", price(2.0, 2.5))
    shop.sell("NVIDIA L40S", 1, "US-TX-1", price(0.8, None))
    offers, dropped = await shop.offers()
    assert set(offers) == {"runpod/runpod/US-TX-1/1x_H100-SXM_SECURE/on-demand"}
    assert dropped == {
        "SkyPilot has no name for the GPU": 1, "price 0 or less": 2, "spot above on-demand": 1,
        "memory of l40s out of range": 1,
    }  # fmt: skip


async def test_counts_end_at_what_a_machine_holds(shop: Shop) -> None:
    for count in (1, 2, 4, 8):
        shop.sell(H100, count, "US-TX-1", price(2.69, None))
    offers, _ = await shop.offers()
    assert {o.gpus for o in offers.values()} == {1, 2}
    assert {o.facts and o.facts.interconnect for o in offers.values() if o.gpus == 2} == {"nvlink"}


async def test_community_hosts_only_when_asked_for(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "DE", price(0.34, 0.20), secure=False)
    assert await shop.offers() == ({}, {})
    offers, _ = await shop.offers(community=True)
    assert {(o.region, o.trust, o.purchase["zone"]) for o in offers.values()} == {("DE", "community", "community")}
    assert {o.instance_type for o in offers.values()} == {"1x_RTX4090_COMMUNITY"}


async def test_a_country_that_runpod_is_not_in_is_reported(shop: Shop) -> None:
    _, dropped = await shop.offers(regions=("RO", "Ro"))
    (said,) = [why for why in dropped if "regions" in why]
    assert said == "of providers.runpod.regions is not there now: Ro (did you mean RO?)"


async def test_only_configured_regions_are_offered(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, None))
    shop.sell(RTX4090, 1, "EU-RO-1", price(0.69, None))
    offers, _ = await shop.offers(regions=("RO",))
    assert {o.region for o in offers.values()} == {"RO"}


NAMES = """
import json
from sky.catalog.data_fetchers import fetch_runpod
from sky.provision.runpod import utils
print(json.dumps([fetch_runpod.REGION_ZONES, utils.GPU_NAME_MAP]))
"""


def test_countries_and_names_are_those_of_skypilot(tmp_path: Path) -> None:
    region_zones, gpu_names = json.loads(run_in_skypilot(NAMES, home=tmp_path).splitlines()[-1])
    assert {zone: country(zone) for zones in region_zones.values() for zone in zones} == {
        zone: region for region, zones in region_zones.items() for zone in zones
    }
    assert {gpu_names[name]: name for name in SKY_NAMES.values()} == SKY_NAMES


async def test_a_purchase_has_a_catalog_row_of_its_own(shop: Shop) -> None:
    """SkyPilot takes the least SpotPrice of the instance type in any zone, and divides it by the GPUs."""
    shop.sell(RTX4090, 4, "US-TX-1", price(0.69, 0.30))
    offers, _ = await shop.offers(restart_s=0)
    bought = shop.cloud().purchase(offers["runpod/runpod/US-TX-1/4x_RTX4090_SECURE/spot"], BootSpec())
    assert (bought.cloud, bought.region, bought.zone, bought.use_spot) == ("runpod", "US", "US-TX-1", True)
    assert bought.instance_type == "4x_RTX4090_SECURE_US-TX-1_1.200"
    (row,) = bought.catalog["runpod/vms.csv"]
    assert (row["InstanceType"], row["Region"], row["AvailabilityZone"]) == (bought.instance_type, "US", "US-TX-1")
    assert (row["AcceleratorName"], row["AcceleratorCount"]) == ("RTX4090", "4.0")
    assert (row["SpotPrice"], row["Price"]) == ("1.200", "2.76")
    fixed = shop.cloud().purchase(offers["runpod/runpod/US-TX-1/4x_RTX4090_SECURE/on-demand"], BootSpec())
    assert (fixed.use_spot, fixed.catalog["runpod/vms.csv"][0]["SpotPrice"]) == (False, "")
    assert fixed.instance_type != bought.instance_type


BIDS = """
import json, sys
import pandas
from sky.catalog import common
from sky.provision.runpod import utils

class Sdk:
    def get_gpu(self, gpu_id):
        return {"memoryInGb": 24}

asked = {}
utils.runpod.runpod = Sdk()
utils.runpod_commands.create_spot_pod = lambda **kw: asked.update(kw) or {"id": "p"}
name, rows = json.loads(sys.argv[1])
frame = pandas.DataFrame(rows).astype({"SpotPrice": float})
bids = [common.get_hourly_cost_impl(frame, row["InstanceType"], True, None, None) / 4 for row in rows]
launched = (name, "head", rows[-1]["InstanceType"], "US", "US-TX-1", 100, "image", None, "key", True, bids[-1], None)
utils.launch(*launched)
print(json.dumps([bids, asked], default=str))
"""
"""SkyPilot's bid for each of our rows, and its create call for the last row."""


async def test_skypilot_bids_what_was_quoted(shop: Shop, tmp_path: Path) -> None:
    """SkyPilot's own code reads our row. The cheaper rows of other zones and times do not matter."""
    rows = []
    for floor in (0.30, 0.20, 0.25):
        shop.sell(RTX4090, 4, "US-TX-1", price(0.69, floor))
        offers, _ = await shop.offers(restart_s=0)
        bought = shop.cloud().purchase(offers["runpod/runpod/US-TX-1/4x_RTX4090_SECURE/spot"], BootSpec())
        rows += list(bought.catalog["runpod/vms.csv"])
    output = await asyncio.to_thread(run_in_skypilot, BIDS, json.dumps([NAME, rows]), home=tmp_path)
    bids, asked = json.loads(output.splitlines()[-1])
    assert bids == pytest.approx([0.30, 0.20, 0.25])
    assert (asked["gpu_type_id"], asked["gpu_count"], asked["cloud_type"]) == (RTX4090, 4, "SECURE")
    assert (asked["bid_per_gpu"], asked["data_center_id"], asked["country_code"]) == (0.25, "US-TX-1", "US")
