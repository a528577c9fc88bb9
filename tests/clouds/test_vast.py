"""Vast's emulator, tested with our Vast client for SkyPilot, and the client with the emulator."""

import asyncio
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import requests

from providers.skypilot.plugin.vastai_sdk import VastAI, parse_query
from tests.clouds.conftest import Time
from tests.clouds.emulator import Clouds
from tests.clouds.vast_market import impossible_rows, many_offers

SKYPILOTS = 'chunked=true georegion=true geolocation="EU" disk_space>=100 num_gpus=1 gpu_name="L40S" cpu_ram>="64.0"'
"""Query of SkyPilot 0.14.1, word for word (sky/provision/vast/utils.py, launch)."""


@pytest.fixture
def sdk(clouds: Clouds, untimed_vast: None) -> VastAI:
    return VastAI(api_key="test-key", server_url=clouds.url)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the SDK, which blocks, in a thread, so that the emulator's loop runs on."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def rent(sdk: VastAI, offer: int, **changes: Any) -> str:
    asked = {"image": "registry/image", "disk": 72, "label": "gb-x-head", "onstart_cmd": "true", "env": {"A": "1"}}
    return str((await call(sdk.create_instance, id=offer, **asked | changes))["new_contract"])


async def listed(sdk: VastAI) -> list[dict[str, Any]]:
    return list(await call(sdk.show_instances))


async def test_a_bid_is_rented_runs_and_is_billed_by_its_own_price(sdk: VastAI, clouds: Clouds, time: Time) -> None:
    await call(sdk.create_ssh_key, ssh_key="ssh-ed25519 AAAA us")
    machine = await rent(sdk, 70010, price=0.2)
    await clouds.world.reach(machine, "running")
    time.pass_by(1800)
    [row] = await listed(sdk)
    assert (row["label"], row["actual_status"], row["is_bid"], row["gpu_name"]) == (
        "gb-x-head", "running", True, "RTX 4090",
    )  # fmt: skip
    assert clouds.world.rented[machine].spec.public_keys == ("ssh-ed25519 AAAA us",)
    await call(sdk.destroy_instance, int(machine))
    time.pass_by(3600)
    assert await listed(sdk) == []
    computing, storage = Decimal("0.2") / 2, Decimal("0.15") * 72 / 720 / 2
    assert clouds.bill().usd("gb-x") == pytest.approx(computing + storage)
    assert clouds.bill().open() == []


async def test_an_outbid_instance_stops_and_pays_for_its_disk_until_destroyed(
    sdk: VastAI, clouds: Clouds, time: Time
) -> None:
    machine = await rent(sdk, 70010, price=0.2)
    await clouds.world.reach(machine, "running")
    await clouds.control.preempt(machine)
    time.pass_by(3600)
    [row] = await listed(sdk)
    assert (row["actual_status"], row["cur_state"], row["ssh_host"]) == ("stopped", "stopped", None)
    assert clouds.bill().usd() == pytest.approx(Decimal("0.15") * 72 / 720)
    assert list(clouds.bill().open()) == [machine]


async def test_a_machine_that_was_outbid_comes_back_and_costs_again(sdk: VastAI, clouds: Clouds, time: Time) -> None:
    machine = await rent(sdk, 70010, price=0.2)
    await clouds.world.reach(machine, "running")
    await clouds.control.preempt(machine)
    await clouds.control.resume(machine)
    await clouds.world.reach(machine, "running")
    time.pass_by(3600)
    assert clouds.bill().usd() == pytest.approx(Decimal("0.2") + Decimal("0.15") * 72 / 720)


async def test_a_rental_without_a_bid_is_on_demand(sdk: VastAI, clouds: Clouds) -> None:
    machine = await rent(sdk, 70010)
    assert not clouds.world.rented[machine].spot
    assert clouds.world.rented[machine].usd_per_hour == Decimal("0.4")


async def test_an_offer_is_sold_once_and_a_low_bid_is_refused(sdk: VastAI, clouds: Clouds) -> None:
    await rent(sdk, 70010)
    with pytest.raises(requests.HTTPError, match="410"):
        await rent(sdk, 70010)
    with pytest.raises(requests.HTTPError, match="400"):
        await rent(sdk, 70020, price=0.01)
    assert clouds.bill().made() == 1


async def test_a_search_filters_orders_and_is_capped(sdk: VastAI, clouds: Clouds) -> None:
    clouds.vast.offers = {offer.id: offer for offer in many_offers(500)}
    found = await call(sdk.search_offers, query="gpu_name=RTX_4090 num_gpus=1 verified=any", order="dph_total")
    assert found
    assert {(row["gpu_name"], row["num_gpus"]) for row in found} == {("RTX 4090", 1)}
    assert [row["dph_total"] for row in found] == sorted(row["dph_total"] for row in found)
    assert len(await call(sdk.search_offers, query="num_gpus>=1", limit=10_000)) == 64


async def test_skypilots_search_finds_what_it_asks_for(sdk: VastAI, clouds: Clouds) -> None:
    """Vast's own SDK reads the query only up to the first quotation mark, so that no filter applies."""
    found = await call(sdk.search_offers, query=SKYPILOTS)
    assert found
    assert {(row["gpu_name"], row["num_gpus"]) for row in found} == {("L40S", 1)}
    assert {row["geolocation"][-2:] for row in found} <= set(parse_query(SKYPILOTS)["geolocation"]["in"])
    assert min(row["cpu_ram"] for row in found) >= 64_000


def test_query_terms_become_filters() -> None:
    asked = (
        'chunked=true geolocation="DE" gpu_name=RTX_4090 cpu_ram>="64.5" datacenter=true hosting_type>=1 verified=any'
    )
    assert parse_query(asked) == {
        "geolocation": {"eq": "DE"}, "gpu_name": {"eq": "RTX 4090"}, "cpu_ram": {"gte": 64_500.0},
        "datacenter": {"eq": True}, "hosting_type": {"gte": 1}, "verified": {"eq": "any"},
    }  # fmt: skip


def test_account_key_is_read_where_vasts_own_tool_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VAST_API_KEY", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"set VAST_API_KEY, or write it to .*/\.config/vastai/vast_api_key"):
        VastAI()
    (tmp_path / ".vast_api_key").write_text("old\n")
    assert VastAI().client.api_key == "old"
    (tmp_path / ".config/vastai").mkdir(parents=True)
    (tmp_path / ".config/vastai/vast_api_key").write_text("new\n")
    assert VastAI().client.api_key == "new"
    monkeypatch.setenv("VAST_API_KEY", "set")
    assert VastAI().client.api_key == "set"


async def test_bids_are_priced_by_their_floor(sdk: VastAI, clouds: Clouds) -> None:
    [row] = [r for r in await call(sdk.search_offers, query="num_gpus=1", type="bid") if r["id"] == 70010]
    assert (row["is_bid"], row["dph_base"], row["min_bid"]) == (True, 0.18, 0.18)


async def test_listings_come_in_pages(sdk: VastAI, clouds: Clouds) -> None:
    clouds.vast.offers = {offer.id: offer for offer in many_offers(40)}
    for offer in clouds.vast.offers:
        await rent(sdk, offer, disk=10)
    assert len(await listed(sdk)) == 40
    assert [c.call for c in clouds.world.calls].count("instances") == 2


async def test_the_wrong_machine_can_be_sold(sdk: VastAI, clouds: Clouds) -> None:
    clouds.control.sell_instead("vast", "70050")
    await rent(sdk, 70010)
    [row] = await listed(sdk)
    assert row["gpu_name"] == "L40S"


async def test_a_wrong_key_is_401(clouds: Clouds) -> None:
    with pytest.raises(requests.HTTPError, match="401"):
        await call(VastAI(api_key="wrong", server_url=clouds.url).show_instances)


async def test_an_unknown_field_or_call_is_a_violation(clouds: Clouds) -> None:
    headers = {"Authorization": "Bearer test-key"}
    unknown = await call(requests.put, f"{clouds.url}/api/v0/asks/70010/", json={"imag": "x"}, headers=headers)
    nowhere = await call(requests.get, f"{clouds.url}/api/v0/nothing/", headers=headers)
    assert (unknown.status_code, nowhere.status_code) == (400, 404)
    assert clouds.violations == [
        "vast: create-instance: body has no field 'imag'", "vast: no such call: GET /api/v0/nothing/",
    ]  # fmt: skip
    clouds.violations.clear()


async def test_rows_that_cannot_be_true_are_for_sale_too(sdk: VastAI, clouds: Clouds) -> None:
    clouds.vast.offers = {offer.id: offer for offer in impossible_rows()}
    assert len(await call(sdk.search_offers, query="rentable=true")) == len(impossible_rows())
