"""Lambda's emulator, by SkyPilot's own client and provisioner in a process of their own."""

import asyncio
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.clouds.conftest import Time
from tests.clouds.emulator import Clouds
from tests.support.skypilot import run_in_skypilot

SKYPILOT = """
import json, os, sys, time
from sky.provision import common
from sky.provision.lambda_cloud import instance, lambda_utils
lambda_utils.API_ENDPOINT = os.environ["GPUBROKER_LAMBDA_ENDPOINT"] + "/api/v1"
client = lambda_utils.LambdaCloudClient()
name, exists = client.get_unique_ssh_key_name("sky-key-x", "ssh-ed25519 AAAA us")
if not exists:
    client.register_ssh_key(name, "ssh-ed25519 AAAA us")
config = common.ProvisionConfig(
    provider_config={"region": "us-east-1"}, authentication_config={"remote_key_name": name}, docker_config={},
    node_config={"InstanceType": "gpu_1x_h100_sxm5"}, count=2, tags={}, resume_stopped_nodes=False,
    ports_to_open_on_launch=None,
)
try:
    record = instance.run_instances("us-east-1", "gb-x", "gb-x-0123", config)
except lambda_utils.LambdaCloudError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
instance.open_ports("gb-x-0123", ["8000", "9000-9010"], {"region": "us-east-1"})
info = instance.get_cluster_info("us-east-1", "gb-x-0123")
query = lambda: {k: v[0] and v[0].value for k, v in instance.query_instances("gb-x", "gb-x-0123", {}, False).items()}
before = query()
instance.terminate_instances("gb-x-0123")
print(json.dumps({
    "head": record.head_instance_id, "created": record.created_instance_ids, "ips": sorted(info.get_feasible_ips()),
    "before": before, "after": query(), "rules": client.list_firewall_rules(),
}))
"""


async def skypilot(clouds: Clouds, home: Path, *, key: str = "test-key") -> dict[str, Any]:
    """Return the provisioner's answers for a launch of two nodes, opened ports, a status query and the termination."""
    keys = home / ".lambda_cloud" / "lambda_keys"
    keys.parent.mkdir()
    keys.write_text(f"api_key = {key}\n")
    output = await asyncio.to_thread(run_in_skypilot, SKYPILOT, home=home, env=clouds.environment)
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


async def test_skypilot_launches_polls_and_terminates(clouds: Clouds, tmp_path: Path) -> None:
    said = await skypilot(clouds, tmp_path)
    rented = list(clouds.world.rented.values())
    assert [r.name for r in rented] == ["gb-x-0123-head", "gb-x-0123-worker"]
    assert said["created"] == [r.id for r in rented]
    assert said["ips"] == sorted(r.spec.ip for r in rented)
    assert set(said["before"].values()) == {"UP"}
    assert said["after"] == {}
    assert [rule["port_range"] for rule in said["rules"]] == [[8000, 8000], [9000, 9010]]
    assert {r.spec.public_keys for r in rented} == {("ssh-ed25519 AAAA us",)}
    assert (clouds.bill().made("gb-x"), list(clouds.bill().open())) == (2, [])


async def test_skypilot_reports_no_capacity(clouds: Clouds, tmp_path: Path) -> None:
    clouds.control.capacity("lambda", "gpu_1x_h100_sxm5", 0)
    assert "insufficient-capacity" in (await skypilot(clouds, tmp_path))["error"]
    assert clouds.bill().made() == 0


LAUNCH = {
    "region_name": "us-east-1",
    "instance_type_name": "gpu_1x_h100_sxm5",
    "ssh_key_names": ["k"],
    "name": "gb-x-head",
}


@pytest.fixture
async def session(clouds: Clouds) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(clouds.url, headers={"Authorization": "Bearer test-key"}) as session:
        async with session.post("/api/v1/ssh-keys", json={"name": "k", "public_key": "ssh-ed25519 AAAA us"}) as answer:
            assert answer.status == 200
        yield session


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with session.request(method, f"/api/v1/{path}", json=body) as answer:
        return answer.status, await answer.json()


async def launch(session: aiohttp.ClientSession) -> str:
    status, answer = await ask(session, "POST", "instance-operations/launch", LAUNCH)
    assert status == 200, answer
    return str(answer["data"]["instance_ids"][0])


async def test_the_bill_runs_from_active_to_terminate_by_the_minute(
    session: aiohttp.ClientSession, clouds: Clouds, time: Time
) -> None:
    clouds.control.hold_boots()
    machine = await launch(session)
    time.pass_by(300)
    assert clouds.bill().usd() == 0
    clouds.control.release_boots()
    await clouds.world.reach(machine, "active")
    time.pass_by(61)
    clouds.control.teardown("lambda", 30)
    await ask(session, "POST", "instance-operations/terminate", {"instance_ids": [machine]})
    time.pass_by(29)
    [shown] = (await ask(session, "GET", "instances"))[1]["data"]
    assert shown["status"] == "terminating"
    time.pass_by(1)
    assert (await ask(session, "GET", "instances"))[1]["data"] == []
    assert clouds.bill().usd() == Decimal("3.29") * 2 / 60


async def test_a_machine_that_is_taken_is_gone_after_its_notice(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    machine = await launch(session)
    await clouds.world.reach(machine, "active")
    await clouds.control.preempt(machine, notice_s=0.01)
    assert len((await ask(session, "GET", "instances"))[1]["data"]) == 1
    await clouds.world.reach(machine, "terminated")
    assert (await ask(session, "GET", "instances"))[1]["data"] == []
    assert list(clouds.bill().open()) == []


async def test_types_say_where_there_is_capacity(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    await launch(session)
    await launch(session)
    types = (await ask(session, "GET", "instance-types"))[1]["data"]
    sold = types["gpu_1x_h100_sxm5"]
    assert [region["name"] for region in sold["regions_with_capacity_available"]] == ["us-south-3"]
    assert sold["instance_type"]["price_cents_per_hour"] == 329
    assert types["gpu_8x_a100_80gb_sxm4"]["instance_type"]["description"] == "8x A100 (80 GB SXM4)"


async def test_launches_that_come_too_fast_are_429(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    clouds.lambdas.launch_interval_s = 60
    await launch(session)
    assert (await ask(session, "POST", "instance-operations/launch", LAUNCH))[0] == 429


async def test_a_price_can_jump_before_the_sale_and_the_wrong_type_can_be_sold(
    session: aiohttp.ClientSession, clouds: Clouds
) -> None:
    clouds.control.price("lambda", "gpu_1x_h100_sxm5", 5.0, at_next_sale=True)
    assert clouds.world.rented[await launch(session)].usd_per_hour == 5
    clouds.control.sell_instead("lambda", "gpu_1x_a100_sxm4")
    await launch(session)
    shown = (await ask(session, "GET", "instances"))[1]["data"]
    assert shown[1]["instance_type"]["name"] == "gpu_1x_a100_sxm4"


async def test_a_wrong_key_is_401(clouds: Clouds) -> None:
    async with aiohttp.ClientSession(clouds.url, headers={"Authorization": "Bearer wrong"}) as session:
        status, answer = await ask(session, "GET", "instances")
    assert (status, answer["error"]["code"]) == (401, "global/invalid-api-key")


async def test_an_unknown_field_or_call_is_a_violation(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    assert (await ask(session, "POST", "instance-operations/launch", LAUNCH | {"spot": True}))[0] == 400
    assert (await ask(session, "GET", "clusters"))[0] == 404
    assert clouds.violations == [
        "lambda: launch: body has no field 'spot'",
        "lambda: no such call: GET /api/v1/clusters",
    ]
    clouds.violations.clear()
