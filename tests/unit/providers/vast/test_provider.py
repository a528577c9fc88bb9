"""Vast by its own API: asks as offers, states mapped whole, listings complete or refused."""

import asyncio
import json
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
from providers.common.machine_task import IMAGE_FIX
from providers.common.market_rules import OfferFilter
from providers.vast.provider import VastCloud, VastConfig
from providers.vast.searches import SearchAnswer
from tests.support.skypilot import run_in_skypilot
from tests.unit.providers.answers import Api, serving
from tests.unit.providers.clocks import InstantClock

INSTALLATION = Installation("abcd")
NAME = InstanceName("gb-abcd-aaaaaaaaaaaaa")
LABEL = f"{NAME}-1a2b3c4d-head"
BUNDLES, INSTANCES, USER = "POST /api/v0/bundles/", "GET /api/v1/instances/", "GET /api/v0/users/current/"
HANDLE = Handle(provider="vast", id="77", name=NAME)


def ask(**changes: Any) -> dict[str, Any]:
    return {
        "id": 9001, "machine_id": 1234, "host_id": 7, "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_ram": 24564,
        "cpu_cores": 64, "cpu_cores_effective": 16.0, "cpu_ram": 257_000, "disk_space": 800.0, "disk_bw": 3100.5,
        "disk_name": "nvme", "inet_up": 810.2, "inet_down": 905.0, "inet_up_cost": 0.01, "inet_down_cost": 0.002,
        "dph_base": 0.40, "dph_total": 0.4139, "min_bid": 0.20, "storage_cost": 0.10, "storage_total_cost": 0.0139,
        "geolocation": "Bavaria, DE", "hosting_type": 0, "verification": "verified", "reliability2": 0.993,
        "cuda_max_good": 12.6, "driver_version": "560.35.03", "bw_nvlink": 0.0, "rentable": True, "rented": False,
    } | changes  # fmt: skip


def machine(**changes: Any) -> dict[str, Any]:
    return {
        "id": 77, "label": LABEL, "actual_status": "running", "intended_status": "running", "cur_state": "running",
        "gpu_name": "RTX 4090", "gpu_ram": 24564, "num_gpus": 1, "is_bid": True, "dph_total": 0.2139,
        "geolocation": "Bavaria, DE",
    } | changes  # fmt: skip


class World:
    def __init__(self, api: Api, home: Path) -> None:
        self.api, self.home = api, home
        self.clouds: list[VastCloud] = []
        self.clock = InstantClock()

    def cloud(self, *, key: str = "test-key", **config: Any) -> VastCloud:
        env = {"VAST_API_KEY": key} if key else {}
        cloud = VastCloud(
            VastConfig(endpoint=self.api.url, **config),
            installation=INSTALLATION, clock=self.clock, env=env, home=self.home, rate_clock=self.clock,
        )  # fmt: skip
        self.clouds.append(cloud)
        return cloud

    async def offers(self, *asks: Any, want: GpuAsk | None = None, **config: Any) -> tuple[list[Offer], dict[str, int]]:
        self.api.routes[BUNDLES] = lambda body, query: {"offers": list(asks)}
        offer_filter = OfferFilter(want or GpuAsk())
        await self.cloud(**config).rows(offer_filter)
        return offer_filter.offers, dict(offer_filter.dropped)

    def listing(self, *machines: Any, **page: Any) -> None:
        self.api.routes[INSTANCES] = lambda body, query: {"instances": list(machines), **page}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with serving() as api:
        world = World(api, tmp_path)
        yield world
        for cloud in world.clouds:
            await cloud.close()


async def test_an_ask_is_sold_at_its_price_and_by_bid(world: World) -> None:
    (fixed, spot), dropped = await world.offers(ask(), restart_s=600)
    assert dropped == {}
    assert (fixed.spot, fixed.usd_per_hour) == (False, Decimal("0.4139"))
    # 0.20 (1 + 0.05 log(600 / 3600 / 0.05)) = 0.21204, rounded up, and the disk
    assert (spot.spot, spot.usd_per_hour, spot.on_demand_usd_per_hour) == (True, Decimal("0.2269"), Decimal("0.4139"))
    assert fixed.instance_type == "1x-RTX_4090-64-257000"
    assert (fixed.region, fixed.accelerator, fixed.gpus, fixed.trust) == ("DE", "rtx4090", 1, "community")
    assert (fixed.vcpus, fixed.gpu_memory_bytes) == (16, 24564 * 1024**2)
    # The machine's memory by its share of the cores.
    assert fixed.ram_bytes == int(257_000 * 0.25) * 1024**2
    assert fixed.facts is not None
    assert (fixed.facts.host, fixed.facts.cuda_max, fixed.facts.driver) == ("1234", "12.6", "560.35.03")
    assert fixed.facts.egress_usd_per_gib == Decimal("0.010738")
    assert (fixed.facts.down_mbit_s, fixed.facts.up_mbit_s, fixed.facts.disk_mb_s) == (905.0, 810.2, 3100.5)
    assert fixed.facts.reliability == 0.993
    assert len({fixed.id, spot.id}) == 2
    (again, _), _ = await world.offers(ask(dph_base=0.5))
    assert again.id == fixed.id


async def test_the_search_asks_for_what_can_be_rented_at_the_disk_that_is_bought(world: World) -> None:
    await world.offers(ask())
    _, body, authorization = world.api.asked[-1]
    assert authorization == "Bearer test-key"
    assert (body["rentable"], body["rented"], body["verified"]) == ({"eq": True}, {"eq": False}, {"eq": True})
    assert (body["disk_space"], body["allocated_storage"]) == ({"gte": 100}, 100)
    await world.offers(ask(), verified=False)
    assert "verified" not in world.api.asked[-1][1]


async def test_an_answer_that_was_cut_off_is_followed_by_searches_for_each_gpu(world: World) -> None:
    """Some accounts get 64 asks at most, the cheapest, in which a dear GPU never shows."""
    market = [ask(id=n, dph_base=0.1 + n / 1000, min_bid=None) for n in range(100)]
    market += [ask(id=500, gpu_name="H100 SXM", gpu_ram=81559, dph_base=2.0, min_bid=None)]

    def search(body: Any, query: Any) -> Any:
        name = body.get("gpu_name", {}).get("eq")
        return {"offers": [row for row in market if name in (None, row["gpu_name"])][:64]}

    world.api.routes[BUNDLES] = search
    cloud = world.cloud()
    for _ in range(3):
        offer_filter = OfferFilter(GpuAsk())
        await cloud.rows(offer_filter)
        world.clock.advance(30)
    assert {o.accelerator for o in offer_filter.offers} == {"rtx4090", "h100-sxm"}
    assert len({o.id for o in offer_filter.offers}) == len(offer_filter.offers) == 65
    market[:] = market[:63]
    world.api.asked.clear()
    await world.cloud().rows(OfferFilter(GpuAsk()))
    assert len(world.api.asked) == 1


async def test_a_larger_disk_is_sold_up_to_the_hosts_free_space(world: World) -> None:
    (fixed, _), _ = await world.offers(ask())
    larger = fixed.with_disk(800 * 10**9)
    assert world.cloud().purchase(larger, BootSpec()).disk_gb == 800
    # $0.10 a GB and month of 720 hours, in whole GiB
    assert larger.added_disk_usd_per_hour == pytest.approx(Decimal("0.10") * 700 / 720, abs=Decimal("0.0002"))
    assert fixed.with_disk(801 * 10**9) is fixed
    (full, _), _ = await world.offers(ask(disk_space=100.0))
    (untold, _), _ = await world.offers(ask(disk_space=None))
    assert (full.larger_disk, untold.larger_disk) == (None, None)


async def test_a_missing_disk_price_is_computed_from_the_ask(world: World) -> None:
    (fixed, _), _ = await world.offers(ask(storage_total_cost=None, storage_cost=0.36))
    assert fixed.usd_per_hour == Decimal("0.45")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu_ram": 24}, "memory of rtx4090 out of range"),
        ({"gpu_ram": 24564 * 1024}, "memory of rtx4090 out of range"),
        ({"dph_base": 0.0, "min_bid": None}, "price 0 or less"),
        ({"cuda_max_good": 12.2}, "driver older than CUDA 12.4"),
        ({"reliability2": 0.62}, "reliability below 0.9"),
        ({"geolocation": None}, "no country"),
        ({"cpu_cores": None}, "unreadable"),
        ({"gpu_name": None}, "unreadable"),
    ],
)
async def test_impossible_and_unusable_asks_are_counted(world: World, changes: dict[str, Any], why: str) -> None:
    offers, dropped = await world.offers(ask(**changes), ask(id=2))
    assert {o.purchase["ask"] for o in offers} == {"2"}
    assert set(dropped) == {why}


async def test_a_row_that_is_no_row_is_counted(world: World) -> None:
    offers, dropped = await world.offers(None, "x", ask())
    assert (len(offers), dropped) == (2, {"unreadable": 2})


async def test_free_or_too_dear_bids_are_counted(world: World) -> None:
    offers, dropped = await world.offers(ask(min_bid=0.0), ask(id=2, min_bid=0.41))
    assert [o.spot for o in offers] == [False, False]
    assert dropped == {"price 0 or less": 1, "spot above on-demand": 1}


async def test_rebuilt_4090s_and_forms_of_cards_are_distinguished(world: World) -> None:
    offers, dropped = await world.offers(
        ask(id=1, gpu_ram=49140), ask(id=2, gpu_name="H100 NVL", gpu_ram=95830),
        ask(id=3, gpu_name="A100 SXM4", gpu_ram=40960), ask(id=4, gpu_name="A100 PCIE", gpu_ram=81920),
    )  # fmt: skip
    kinds = {o.purchase["ask"]: (o.accelerator, o.gpu_memory_bytes // GIB) for o in offers}
    assert kinds == {"1": ("rtx4090", 47), "2": ("h100-nvl", 93), "3": ("a100-40gb", 40), "4": ("a100-80gb-pcie", 80)}
    assert dropped == {}


async def test_trust_region_and_interconnect(world: World) -> None:
    rows = [ask(id=1, hosting_type=1, num_gpus=8, bw_nvlink=300.0), ask(id=2, num_gpus=2), ask(id=3, geolocation="US")]
    offers, _ = await world.offers(*rows)
    facts = {o.purchase["ask"]: (o.trust, o.facts and o.facts.interconnect, o.region) for o in offers}
    assert facts == {"1": ("secure", "nvlink", "DE"), "2": ("community", "pcie", "DE"), "3": ("community", None, "US")}
    only, dropped = await world.offers(*rows, community=False)
    assert ({o.purchase["ask"] for o in only}, dropped) == ({"1"}, {"not in a data centre": 2})
    there, _ = await world.offers(*rows, regions=("US",))
    assert {o.purchase["ask"] for o in there} == {"3"}


async def test_a_country_that_no_host_is_in_is_reported(world: World) -> None:
    _, dropped = await world.offers(ask(), regions=("UK", "DE"))
    assert dropped == {"of providers.vast.regions is not there now: UK (there are DE)": 1}


SKYPILOT = """
import json, sys
from sky.provision.vast import utils

class Sdk:
    class client:
        api_key = "test-key"

    def search_offers(self, query):
        self.query = query
        return [{"id": 9001}]

    def create_instance(self, **kwargs):
        self.created = kwargs
        return {"new_contract": 1}

    def show_instance(self, id):
        return {"id": id}

sdk = Sdk()
utils.vast.vast = lambda: sdk
*launch, kwargs = json.loads(sys.argv[1])
utils.launch(*launch, create_instance_kwargs=kwargs)
print(json.dumps([sdk.query, sdk.created]))
"""
"""SkyPilot's launch on Vast, with the SDK's calls recorded."""


async def test_purchase_pins_the_ask_and_gives_the_bid(world: World) -> None:
    """SkyPilot's own launch reads our instance type and sends our price."""
    (fixed, spot), _ = await world.offers(ask())
    bought = world.cloud().purchase(spot, BootSpec())
    assert (bought.cloud, bought.region, bought.zone, bought.use_spot) == ("vast", "DE", None, True)
    assert bought.pin == {"ask": "9001", "machine": "1234"}
    assert bought.config == {"vast": {"create_instance_kwargs": {"price": 0.213}}}
    assert world.cloud().purchase(fixed, BootSpec()).config == {}
    (row,) = bought.catalog["vast/vms.csv"]
    assert (row["InstanceType"], row["Region"], row["AcceleratorName"]) == (bought.instance_type, "DE", "RTX4090")
    assert (row["SpotPrice"], row["Price"]) == ("0.226900", "0.413900")
    kwargs: Any = bought.config["vast"]
    launch = [
        LABEL, bought.instance_type, bought.region, bought.disk_gb, "image", None, True, False,
        kwargs["create_instance_kwargs"],
    ]  # fmt: skip
    output = await asyncio.to_thread(run_in_skypilot, SKYPILOT, json.dumps(launch), home=world.home)
    query, created = json.loads(output.splitlines()[-1])
    assert 'num_gpus=1 gpu_name="RTX 4090"' in query
    assert (created["price"], created["disk"]) == (0.213, 100)


@pytest.mark.parametrize("gpu", ["RTX 4090-D", "Q RTX 6000 - Ada"])
async def test_a_hyphen_in_a_gpu_name_is_a_space_in_its_type(world: World, gpu: str) -> None:
    """SkyPilot, and we, split the type at its hyphens."""
    (fixed, _), _ = await world.offers(ask(gpu_name=gpu))
    first, _, cores, number, ram = world.cloud().purchase(fixed, BootSpec()).instance_type.split("-")
    assert (first, cores, number, ram) == ("1x", "64", "9001", "257000")


@pytest.mark.parametrize(
    ("told", "faulty"),
    [
        ({"actual_status": "loading", "status_msg": "Error: manifest unknown\n"}, True),
        ({"actual_status": None, "status_msg": "Error: manifest unknown"}, True),
        ({"actual_status": "running", "status_msg": "Error: manifest unknown"}, False),
        ({"actual_status": "loading", "status_msg": "Pulling from me/trainer"}, False),
        ({"actual_status": "loading", "status_msg": None}, False),
    ],
)
async def test_an_image_that_a_host_is_refused_is_the_machines_fault(
    world: World, told: dict[str, Any], faulty: bool
) -> None:
    world.listing(machine(**told))
    (seen,) = await world.cloud().list()
    assert seen.fault == ("the image cannot be pulled: Error: manifest unknown; " + IMAGE_FIX if faulty else None)


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"actual_status": None}, InstanceState.STARTING),
        ({"actual_status": "created"}, InstanceState.STARTING),
        ({"actual_status": "loading"}, InstanceState.STARTING),
        ({"actual_status": "rebooting"}, InstanceState.STARTING),
        ({"actual_status": "running"}, InstanceState.RUNNING),
        ({"actual_status": "stopped"}, InstanceState.STOPPED),
        ({"actual_status": "exited"}, InstanceState.STOPPED),
        ({"actual_status": "offline"}, InstanceState.STOPPED),
        ({"actual_status": "frozen"}, InstanceState.STOPPED),
        ({"actual_status": "loading", "intended_status": "stopped"}, InstanceState.STOPPED),
        ({"actual_status": "running", "cur_state": "stopped"}, InstanceState.STOPPED),
        ({"actual_status": "unknown"}, InstanceState.UNKNOWN),
        ({"actual_status": "what-is-this"}, InstanceState.UNKNOWN),
    ],
)
async def test_instance_states_map_to_machine_states(world: World, told: dict[str, Any], state: InstanceState) -> None:
    world.listing(machine(**told))
    (seen,) = await world.cloud().list()
    assert seen.state is state
    assert (seen.handle.name, seen.handle.id, seen.handle.region) == (NAME, "77", "DE")


async def test_listed_instances_are_read_back(world: World) -> None:
    world.listing(machine(gpu_name="RTX 3090", gpu_ram=24576, num_gpus=2, is_bid=False, dph_total=0.3))
    (seen,) = await world.cloud().list()
    assert (seen.accelerator, seen.gpus, seen.spot) == ("rtx-3090", 2, False)
    assert (seen.gpu_memory_bytes, seen.usd_per_hour) == (24 * GIB, Decimal("0.3"))


async def test_foreign_instances_are_not_ours(world: World) -> None:
    world.listing(machine(label=None), machine(id=2, label="gb-zzzz-aaaaaaaaaaaaa-1a2b3c4d-head"), machine(id=3))
    assert [o.handle.id for o in await world.cloud().list()] == ["3"]


async def test_all_pages_are_read(world: World) -> None:
    pages = {None: ([machine(id=1)], "t1"), "t1": ([machine(id=2)], "t2"), "t2": ([machine(id=3)], None)}

    def page(body: Any, query: Any) -> Any:
        machines, token = pages[query.get("after_token")]
        return {"instances": machines, "next_token": token, "total_instances": 3}

    world.api.routes[INSTANCES] = page
    assert [o.handle.id for o in await world.cloud().list()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "answer",
    [
        {"instances": [], "total_instances": 1},
        {"instances": [machine()], "next_token": "for-ever"},
        {"instances": "?"},
        {"instances": [{"id": 1}]},
        [],
    ],
)
async def test_a_possibly_incomplete_listing_is_an_error(world: World, answer: Any) -> None:
    world.api.routes[INSTANCES] = lambda body, query: answer
    with pytest.raises(OutcomeUnknown):
        await world.cloud().list()


async def test_destroy_deletes_the_instance(world: World) -> None:
    path = "DELETE /api/v0/instances/77/"
    world.api.routes[path] = lambda body, query: {"success": True}
    await world.cloud().destroy(HANDLE)
    assert world.api.asked[-1][0] == path
    missing = {"success": False, "error": "no_such_instance", "msg": "Instance 77 not found."}
    world.api.routes[path] = lambda body, query: missing
    with pytest.raises(Gone):
        await world.cloud().destroy(HANDLE)
    world.api.routes[path] = lambda body, query: web.json_response(missing, status=404)
    with pytest.raises(Gone):
        await world.cloud().destroy(HANDLE)
    world.api.routes[path] = lambda body, query: {"success": False, "msg": "try later"}
    with pytest.raises(OutcomeUnknown, match="try later"):
        await world.cloud().destroy(HANDLE)


async def test_check_reports_the_accounts_state(world: World) -> None:
    world.api.routes[USER] = lambda body, query: {"credit": 12.5, "api_key": "secret"}
    assert await world.cloud().check() is None
    world.api.routes[USER] = lambda body, query: {"credit": 0.2, "api_key": "secret"}
    said = await world.cloud().check()
    assert said is not None
    assert "$0.2" in said
    assert "secret" not in said


async def test_each_refusal_of_vast_has_its_error(world: World) -> None:
    with pytest.raises(Rejected, match="VAST_API_KEY"):
        await world.cloud(key="").list()
    world.api.routes[INSTANCES] = lambda body, query: web.json_response({"msg": "bad key"}, status=401)
    with pytest.raises(Rejected, match=r"refuses the key \(401\): make one at https://cloud.vast.ai"):
        await world.cloud().list()
    world.api.routes[INSTANCES] = lambda body, query: web.Response(status=429, headers={"Retry-After": "7"})
    with pytest.raises(Throttled) as e:
        await world.cloud().list()
    assert e.value.after_s == 7.0
    world.api.routes[INSTANCES] = lambda body, query: web.Response(status=502, text="<html>")
    with pytest.raises(OutcomeUnknown):
        await world.cloud().list()


async def test_a_new_key_is_taken_up(world: World) -> None:
    world.listing()
    cloud = world.cloud(key="")
    path = world.home / ".config/vastai/vast_api_key"
    path.parent.mkdir(parents=True)
    for key in ("one", "two"):
        path.write_text(key)
        await cloud.list()
        assert world.api.asked[-1][2] == f"Bearer {key}"


async def test_reading_five_thousand_asks_lets_others_in(world: World) -> None:
    rows = [ask(id=n, machine_id=n // 4, dph_base=0.3 + n / 10_000) for n in range(5000)]
    market, offer_filter = world.cloud()._market, OfferFilter(GpuAsk())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await market.fill(offer_filter, [SearchAnswer(rows=rows, seen_at=world.clock.now(), at_s=0.0)])
    beside.cancel()
    assert len(offer_filter.offers) == 10_000
    assert turns >= 10
