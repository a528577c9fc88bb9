"""RunPod by its own API: places with live prices as offers, bids that SkyPilot cannot mistake, states mapped whole."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.domain.errors import Gone, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import BootSpec, InstanceState
from broker.domain.job import Handle
from broker.domain.offer import GIB, GpuAsk, Offer
from providers.common.market_rules import OfferFilter
from providers.runpod.market import DISK_USD_PER_HOUR, SKY_NAMES, country
from providers.runpod.provider import RunpodCloud, RunpodConfig
from tests.support.skypilot import run_in_skypilot
from tests.unit.providers.answers import Api, serving
from tests.unit.providers.clocks import SteppedClock

NAME = InstanceName("gb-abcd-aaaaaaaaaaaaa")
HANDLE = Handle(provider="runpod", id="pod1", name=NAME)
GRAPHQL = "POST /graphql"
RTX4090, H100 = "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"
PRICE = re.compile(
    r"(\w+): lowestPrice\(input: \{ gpuCount: (\d+), secureCloud: (true|false)"
    r'(?:, (?:dataCenterId|countryCode): "([\w-]+)")? \}\)'
)
TYPE = re.compile(r'(\w+): gpuTypes\(input: \{ id: "([^"]+)" \}\) \{(.*?)\} (?=\w+: gpuTypes|\}$)', re.S)


def price(on_demand: float | None, bid: float | None, stock: str | None = "High") -> dict[str, Any]:
    return {
        "uninterruptablePrice": on_demand, "minimumBidPrice": bid, "stockStatus": stock, "minVcpu": 8, "minMemory": 62,
    }  # fmt: skip


def gpu(gpu_id: str, gb: int, most: int = 8) -> dict[str, Any]:
    return {"id": gpu_id, "displayName": gpu_id, "memoryInGb": gb, "maxGpuCount": most}


class Shop:
    """RunPod's side: `prices` by (GPU, count, secure, place); place None is the lowest of all places."""

    def __init__(self, api: Api, home: Path) -> None:
        self.types = [gpu(RTX4090, 24), gpu(H100, 80, most=2)]
        self.zones = [("US-TX-1", True), ("EU-RO-1", True), ("US-GA-9", False)]
        self.prices: dict[tuple[str, int, bool, str | None], Any] = {}
        self.pods: list[dict[str, Any]] = []
        self.balance = 25.0
        self.errors: list[Any] = []
        self.api, self.home = api, home
        self.clouds: list[RunpodCloud] = []
        api.routes[GRAPHQL] = self.answer

    def sell(self, gpu_id: str, count: int, place: str, offered: Any, *, secure: bool = True) -> None:
        self.prices[gpu_id, count, secure, place] = self.prices[gpu_id, count, secure, None] = offered

    def answer(self, body: Any, _: Any) -> Any:
        query = body["query"]
        if self.errors:
            return {"errors": self.errors}
        if "podTerminate" in query:
            self.pods = [pod for pod in self.pods if f'"{pod["id"]}"' not in query]
            return {"data": {"podTerminate": None}}
        if "myself" in query:
            return {"data": {"myself": {"pods": self.pods, "id": "u", "clientBalance": self.balance}}}
        if "dataCenters" in query:
            types = [t | self._priced(t["id"], query) for t in self.types]
            centres = [{"id": zone, "listed": listed} for zone, listed in self.zones]
            return {"data": {"gpuTypes": types, "dataCenters": centres, "countryCodes": ["US", "DE"]}}
        return {"data": {alias: [self._priced(gpu_id, asked)] for alias, gpu_id, asked in TYPE.findall(query)}}

    def _priced(self, gpu_id: str, asked: str) -> dict[str, Any]:
        return {
            alias: self.prices.get((gpu_id, int(count), secure == "true", place or None), price(None, None, None))
            for alias, count, secure, place in PRICE.findall(asked)
        }

    def cloud(self, *, key: str = "test-key", **config: Any) -> RunpodCloud:
        cloud = RunpodCloud(
            RunpodConfig(endpoint=self.api.url, **config), installation=Installation("abcd"), clock=SteppedClock(),
            env={"RUNPOD_API_KEY": key} if key else {}, home=self.home,
        )  # fmt: skip
        self.clouds.append(cloud)
        return cloud

    async def offers(self, **config: Any) -> tuple[dict[str, Offer], dict[str, int]]:
        offer_filter = OfferFilter(GpuAsk())
        await self.cloud(**config).rows(offer_filter)
        return {offer.id: offer for offer in offer_filter.offers}, dict(offer_filter.dropped)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    async with serving() as api:
        shop = Shop(api, tmp_path)
        yield shop
        for cloud in shop.clouds:
            await cloud.close()


def pod(**changes: Any) -> dict[str, Any]:
    return {
        "id": "pod1", "name": f"{NAME}-1a2b3c4d-head", "desiredStatus": "RUNNING", "costPerHr": 0.36, "gpuCount": 1,
        "podType": "INTERRUPTABLE", "machine": {"gpuDisplayName": "RTX 4090"},
    } | changes  # fmt: skip


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


def test_disk_price() -> None:
    """100 GB at $0.10 a month of 720 h."""
    assert pytest.approx(0.10 * 100 / 720, abs=1e-6) == float(DISK_USD_PER_HOUR)


async def test_no_stock_is_said(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-TX-1", price(0.69, None, stock=None))
    offers, _ = await shop.offers()
    assert [o.available for o in offers.values()] == [False]


async def test_places_that_name_no_price_or_are_not_listed_have_no_offer(shop: Shop) -> None:
    shop.sell(RTX4090, 1, "US-GA-9", price(0.69, 0.3))
    offers, dropped = await shop.offers()
    assert (offers, dropped) == ({}, {})


async def test_what_cannot_be_true_or_bought_is_counted(shop: Shop) -> None:
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


async def test_a_country_that_runpod_is_not_in_is_told(shop: Shop) -> None:
    _, dropped = await shop.offers(regions=("RO", "Ro"))
    (said,) = [why for why in dropped if "regions" in why]
    assert said == "of providers.runpod.regions is not there now: Ro (did you mean RO?)"


async def test_regions(shop: Shop) -> None:
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


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("CREATED", InstanceState.STARTING),
        ("RESTARTING", InstanceState.STARTING),
        ("RUNNING", InstanceState.RUNNING),
        ("PAUSED", InstanceState.STOPPED),
        ("EXITED", InstanceState.STOPPED),
        ("DEAD", InstanceState.STOPPED),
        ("TERMINATED", InstanceState.STOPPED),
        ("WHAT_IS_THIS", InstanceState.UNKNOWN),
        (None, InstanceState.UNKNOWN),
    ],
)
async def test_states(shop: Shop, told: str | None, state: InstanceState) -> None:
    shop.pods = [pod(desiredStatus=told)]
    (seen,) = await shop.cloud().list()
    assert seen.state is state
    assert (seen.handle.name, seen.handle.id) == (NAME, "pod1")


async def test_what_stands_there_is_read_back(shop: Shop) -> None:
    shop.pods = [
        pod(), pod(id="p2", podType="RESERVED", gpuCount=2, costPerHr=3.28, machine={"gpuDisplayName": "A100 SXM"}),
        pod(id="p3", podType=None, costPerHr=0, machine=None, gpuCount=None),
    ]  # fmt: skip
    one, two, bare = await shop.cloud().list()
    assert (one.accelerator, one.gpus, one.spot, one.usd_per_hour) == ("rtx4090", 1, True, Decimal("0.36"))
    assert (two.accelerator, two.gpus, two.spot, two.usd_per_hour) == ("a100-80gb-sxm", 2, False, Decimal("3.28"))
    assert (bare.accelerator, bare.gpus, bare.spot, bare.usd_per_hour) == (None, None, None, None)


async def test_foreign_pods_are_not_ours_and_unreadable_ones_no_absence(shop: Shop) -> None:
    shop.pods = [pod(name="mine"), pod(id="p2", name="gb-zzzz-aaaaaaaaaaaaa-1a2b3c4d-head"), pod(id="p3")]
    assert [o.handle.id for o in await shop.cloud().list()] == ["p3"]
    shop.pods = [{"id": "p4"}]
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().list()


async def test_destroy_ends_the_pod(shop: Shop) -> None:
    shop.pods = [pod(), pod(id="other")]
    await shop.cloud().destroy(HANDLE)
    assert [p["id"] for p in shop.pods] == ["other"]


async def test_destroying_what_is_gone(shop: Shop) -> None:
    """RunPod's word for it is not known, so the listing decides."""
    said = {"errors": [{"message": "Something went wrong. Please try again later."}], "data": {"podTerminate": None}}
    shop.api.routes[GRAPHQL] = lambda body, query: said if "podTerminate" in body["query"] else shop.answer(body, query)
    with pytest.raises(Gone):
        await shop.cloud().destroy(HANDLE)
    shop.pods = [pod()]
    with pytest.raises(OutcomeUnknown, match="Something went wrong"):
        await shop.cloud().destroy(HANDLE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "Unauthorized"}, Rejected),
        ({"message": "x", "extensions": {"code": "UNAUTHENTICATED"}}, Rejected),
        ({"message": "Cannot query field", "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}, Rejected),
        ({"message": "Request failed with status code 401"}, Rejected),
        ({"message": "pod 403xq401ab8s cannot be found"}, OutcomeUnknown),
        ({"message": "machine 401 is being looked after"}, OutcomeUnknown),
        ({"message": "Too many requests"}, Throttled),
        ({"message": "Something went wrong"}, OutcomeUnknown),
        ("nonsense", OutcomeUnknown),
    ],
)
async def test_graphql_errors(shop: Shop, error: Any, kind: type[Exception]) -> None:
    shop.errors = [error]
    with pytest.raises(kind) as e:
        await shop.cloud().list()
    assert e.type is kind
    assert "\n" not in str(e.value)
    assert "test-key" not in str(e.value)


async def test_keys(shop: Shop) -> None:
    await shop.cloud().list()
    assert shop.api.asked[-1][2] == "Bearer test-key"
    with pytest.raises(Rejected, match="RUNPOD_API_KEY"):
        await shop.cloud(key="").list()
    shop.api.routes[GRAPHQL] = lambda body, query: web.Response(status=401)
    with pytest.raises(Rejected, match=r"refuses the key \(401\)"):
        await shop.cloud().list()


async def test_check(shop: Shop) -> None:
    assert await shop.cloud().check() is None
    shop.balance = 0.25
    said = await shop.cloud().check()
    assert said is not None
    assert "$0.25" in said


@pytest.mark.parametrize("answer", [{"data": None}, {"data": {"myself": None}}, {"data": {"myself": {}}}, [], {}])
async def test_an_answer_that_is_no_listing(shop: Shop, answer: Any) -> None:
    shop.api.routes[GRAPHQL] = lambda body, query: answer
    with pytest.raises(OutcomeUnknown):
        await shop.cloud().list()
