"""Native halves of RunPod and Vast against the emulators, from the quote to the bill."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from broker.domain.errors import Gone, OutcomeUnknown
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import BootSpec, InstanceState, Observed
from broker.domain.offer import GpuAsk, Offer
from broker.lifecycle.liveness import mismatch_message
from broker.runtime.clock import SystemClock
from providers.common.cloud import Purchase
from providers.common.market_rules import OfferFilter
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.skypilot.plugin.vastai_sdk import VastAI
from providers.vast.provider import VastCloud, VastConfig
from tests.clouds.emulator import Clouds
from tests.clouds.limits import RateLimits
from tests.clouds.vast_market import impossible_rows, many_offers
from tests.support.skypilot import run_in_skypilot
from tests.unit.providers.clocks import InstantClock

NAME = InstanceName("gb-abcd-aaaaaaaaaaaaa")
CLUSTER = f"{NAME}-1a2b3c4d"


@pytest.fixture
async def clouds() -> AsyncIterator[Clouds]:
    async with Clouds() as clouds:
        yield clouds
        assert clouds.violations == []


@pytest.fixture
async def runpod(clouds: Clouds, tmp_path: Path) -> AsyncIterator[RunpodCloud]:
    config = RunpodConfig(endpoint=clouds.url, community=True)
    cloud = RunpodCloud(
        config,
        installation=Installation("abcd"),
        clock=SystemClock(),
        env={"RUNPOD_API_KEY": "test-key"},
        home=tmp_path,
    )
    yield cloud
    await cloud.close()


@pytest.fixture
async def vast(clouds: Clouds, tmp_path: Path) -> AsyncIterator[VastCloud]:
    cloud = VastCloud(
        VastConfig(endpoint=clouds.url),
        installation=Installation("abcd"), clock=SystemClock(), env={"VAST_API_KEY": "test-key"}, home=tmp_path,
    )  # fmt: skip
    yield cloud
    await cloud.close()


async def offers(cloud: Any, **ask: Any) -> tuple[list[Offer], dict[str, int]]:
    offer_filter = OfferFilter(GpuAsk(**ask))
    await cloud.rows(offer_filter)
    return sorted(offer_filter.offers, key=lambda o: o.usd_per_hour / o.gpus), dict(offer_filter.dropped)


async def seen(cloud: Any, state: InstanceState) -> Observed:
    """Wait until our only machine is in that state, and return it."""
    async with asyncio.timeout(300):
        while True:
            (machine,) = await cloud.list()
            if machine.state is state:
                found: Observed = machine
                return found
            await asyncio.sleep(0.01)


async def test_runpod_is_priced_place_by_place(runpod: RunpodCloud) -> None:
    found, dropped = await offers(runpod, accelerators=("rtx4090",))
    assert dropped == {}
    assert {(o.region, o.trust, o.spot) for o in found if o.gpus == 1} == {
        ("RO", "secure", True), ("RO", "secure", False), ("IS", "secure", True), ("IS", "secure", False),
        ("US", "community", True), ("US", "community", False),
    }  # fmt: skip
    assert {o.gpus for o in found} == {1, 2, 4, 8}
    assert await runpod.check() is None


LAUNCH = """
import json, sys
import pandas
import runpod
from sky.catalog import common
from sky.provision.runpod import utils

runpod.api_key = "test-key"
cluster, instance_type, region, zone, disk_gb, gpus, rows = json.loads(sys.argv[1])
frame = pandas.DataFrame(rows).astype({"SpotPrice": float})
bid = common.get_hourly_cost_impl(frame, instance_type, True, None, None) / gpus
utils.launch(cluster, "head", instance_type, region, zone, disk_gb, "image", None, "ssh-rsa AAAA", True, bid, None)
"""
"""SkyPilot's launch of one machine on RunPod."""


async def test_runpod_by_skypilots_own_call(clouds: Clouds, runpod: RunpodCloud, tmp_path: Path) -> None:
    found, _ = await offers(runpod, accelerators=("h100-sxm",), min_gpus=2)
    offer = next(o for o in found if o.spot and o.gpus == 2)
    bought = runpod.purchase(offer, BootSpec())
    rows = list(map(dict, bought.catalog["runpod/vms.csv"]))
    launch = [CLUSTER, bought.instance_type, bought.region, bought.zone, bought.disk_gb, offer.gpus, rows]
    env = {"RUNPOD_API_BASE_URL": clouds.url}
    await asyncio.to_thread(run_in_skypilot, LAUNCH, json.dumps(launch), home=tmp_path, env=env)
    machine = await seen(runpod, InstanceState.RUNNING)
    assert machine.handle.name == NAME
    assert mismatch_message(offer, (machine,)) is None
    assert (machine.spot, machine.gpus, machine.accelerator) == (None, 2, "h100-sxm")
    await taken_away_and_destroyed(clouds, runpod, machine)


async def test_runpod_retires_one_api_then_the_other(clouds: Clouds, runpod: RunpodCloud) -> None:
    ask = (
        f'mutation {{ podFindAndDeployOnDemand(input: {{ name: "{CLUSTER}-head", cloudType: SECURE, gpuCount: 1,'
        ' gpuTypeId: "NVIDIA L40S", imageName: "i" }) { id } }'
    )
    await send(clouds, "POST", "/graphql", {"query": ask})
    clouds.control.retire("rest", in_s=3600)
    machine = await seen(runpod, InstanceState.RUNNING)
    clouds.control.retire("rest", status=404)
    assert (await seen(runpod, InstanceState.RUNNING)).handle == machine.handle
    await runpod.destroy(machine.handle)
    assert clouds.bill().open() == []
    clouds.control.retire("graphql")
    with pytest.raises(OutcomeUnknown, match="410"):
        await runpod.list()


async def test_runpod_sells_another_gpu(clouds: Clouds, runpod: RunpodCloud) -> None:
    found, _ = await offers(runpod, accelerators=("rtx4090",))
    offer = next(o for o in found if o.gpus == 1 and o.trust == "secure" and not o.spot)
    clouds.control.sell_instead("runpod", "NVIDIA RTX A6000")
    ask = (
        f'mutation {{ podFindAndDeployOnDemand(input: {{ name: "{CLUSTER}-head", cloudType: SECURE, gpuCount: 1,'
        f' gpuTypeId: "NVIDIA GeForce RTX 4090", dataCenterId: "{offer.purchase["zone"]}", imageName: "i" }})'
        " { id } }"
    )
    await send(clouds, "POST", "/graphql", {"query": ask})
    assert mismatch_message(offer, tuple(await runpod.list())) == "asked for rtx4090, got a6000"


async def test_vast_by_its_ask(clouds: Clouds, vast: VastCloud) -> None:
    found, dropped = await offers(vast, accelerators=("rtx4090",))
    assert dropped == {}
    offer = next(o for o in found if o.spot)
    assert offer.usd_per_hour == found[0].usd_per_hour
    await rent(clouds, vast.purchase(offer, BootSpec()))
    machine = await seen(vast, InstanceState.RUNNING)
    assert mismatch_message(offer, (machine,)) is None
    # The disk is in our price, and in what Vast reads back: to the micro-dollar, rounded up.
    assert machine.usd_per_hour == pytest.approx(offer.usd_per_hour, abs=2e-6)
    assert (machine.spot, machine.gpus, machine.handle.region) == (True, 1, offer.region)
    assert offer.id not in {o.id for o in (await offers(vast))[0]}
    await taken_away_and_destroyed(clouds, vast, machine)


async def test_vast_sells_another_gpu(clouds: Clouds, vast: VastCloud) -> None:
    found, _ = await offers(vast, accelerators=("h100-sxm",))
    offer = next(o for o in found if not o.spot)
    clouds.control.sell_instead("vast", "70050")
    await rent(clouds, vast.purchase(offer, BootSpec()))
    assert mismatch_message(offer, tuple(await vast.list())) == "asked for h100-sxm, got l40s"


async def test_impossible_vast_rows_are_counted(clouds: Clouds, vast: VastCloud) -> None:
    clouds.vast.search_cap = None
    before, _ = await offers(vast)
    clouds.vast.offers |= {row.id: row for row in impossible_rows()}
    after, dropped = await offers(vast)
    # The on-demand half of a row whose bid alone is wrong is true.
    assert len(after) == len(before) + 1
    assert dropped == {
        "price 0 or less": 2, "spot above on-demand": 1, "memory of h100-sxm out of range": 2,
        "memory of rtx4090 out of range": 2, "no GPU": 1, "not an NVIDIA GPU": 1, "share of a GPU": 1,
        "ARM processor: the image is for x86-64": 1, "laptop or workstation variant of a GPU": 1,
        "contract of the host ends within 5 min": 1,
    }  # fmt: skip


async def test_vasts_whole_market_though_each_answer_is_cut_off(clouds: Clouds, tmp_path: Path) -> None:
    clouds.vast.offers = {row.id: row for row in many_offers(500)}
    clouds.faults.limits.enforced = True
    vast = VastCloud(
        VastConfig(endpoint=clouds.url), installation=Installation("abcd"), clock=SystemClock(),
        env={"VAST_API_KEY": "test-key"}, home=tmp_path, rate_clock=(rate_clock := InstantClock()),
    )  # fmt: skip
    await offers(vast)
    rate_clock.advance(60)
    clouds.faults.limits = RateLimits(enforced=True)  # a minute has passed there too
    found, _ = await offers(vast)
    assert not [call for call in clouds.world.calls if call.status == 429]
    assert {o.accelerator for o in found} == {
        "h100-sxm", "h100-pcie", "h100-nvl", "a100-80gb-sxm", "a100-40gb-pcie", "l40s", "rtx4090"
    }  # fmt: skip
    clouds.vast.search_cap = None
    clouds.faults.limits.enforced = False
    rate_clock.advance(60)
    everything, dropped = await offers(vast)
    await vast.close()
    assert len(everything) > len(found)
    assert set(dropped) <= {"driver older than CUDA 12.4", "reliability below 0.9"}


async def taken_away_and_destroyed(clouds: Clouds, cloud: Any, machine: Observed) -> None:
    await clouds.control.preempt(machine.handle.id)
    (stopped,) = await cloud.list()
    assert stopped.state is InstanceState.STOPPED
    await cloud.destroy(machine.handle)
    assert await cloud.list() == []
    with pytest.raises(Gone):
        await cloud.destroy(machine.handle)


async def rent(clouds: Clouds, bought: Purchase) -> None:
    """Rent as SkyPilot's Vast provisioner does after our plugin has pinned the ask."""
    config: Any = bought.config.get("vast", {"create_instance_kwargs": {}})
    body = {"client_id": "me", "image": "i", "label": f"{CLUSTER}-head", "disk": bought.disk_gb, "runtype": "ssh"}
    await send(clouds, "PUT", f"/api/v0/asks/{bought.pin['ask']}/", body | config["create_instance_kwargs"])


async def send(clouds: Clouds, method: str, path: str, body: Any) -> None:
    headers = {"Authorization": "Bearer test-key"}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, clouds.url + path, json=body, headers=headers) as r,
    ):
        assert r.status == 200, await r.text()
        assert "errors" not in await r.json()


async def test_limits_of_listing_with_many_instances_of_others(
    clouds: Clouds, vast: VastCloud, untimed_vast: None
) -> None:
    """A second page that follows at once is refused, so from 26 instances on no listing would be complete."""
    clouds.vast.offers |= {row.id: row for row in many_offers(30)}
    for offer in many_offers(30):
        await rent_directly(clouds, offer.id)
    clouds.faults.limits.enforced = True
    assert await vast.list() == []
    assert [call.status for call in clouds.world.calls if call.call == "instances"] == [200, 200]
    with pytest.raises(requests.HTTPError, match="429"):
        await asyncio.to_thread(_listings_at_once, clouds.url)


async def rent_directly(clouds: Clouds, offer: int) -> None:
    sdk = VastAI(api_key="test-key", server_url=clouds.url)
    await asyncio.to_thread(sdk.create_instance, id=offer, image="registry/image", disk=30, label="another")


def _listings_at_once(url: str) -> None:
    for _ in range(2):
        headers = {"Authorization": "Bearer test-key"}
        requests.get(f"{url}/api/v1/instances/", headers=headers, timeout=10).raise_for_status()
