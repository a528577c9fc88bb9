"""RunPod's emulator, called by RunPod's SDK and with SkyPilot's queries."""

import asyncio
import base64
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import requests
import runpod  # type: ignore[import-untyped]
from runpod.api.graphql import run_graphql_query  # type: ignore[import-untyped]
from runpod.error import AuthenticationError, QueryError  # type: ignore[import-untyped]

from tests.clouds.conftest import Time
from tests.clouds.emulator import Clouds
from tests.clouds.runpod_api import startup_of

L40S = "NVIDIA L40S"
SPOT = """mutation {{ podRentInterruptable(input: {{ name: "gb-x-head", imageName: "registry/image",
  gpuTypeId: "NVIDIA L40S", bidPerGpu: {bid}, volumeMountPath: "/runpod-volume", cloudType: SECURE, startSsh: true,
  supportPublicIp: true, gpuCount: 1, minMemoryInGb: 48, minVcpuCount: 4, containerDiskInGb: 100,
  ports: "22/tcp,8266/http,6380/http", dockerArgs: "{args}", dataCenterId: "US-GA-1", countryCode: "US" }})
  {{ id desiredStatus imageName env machineId machine {{ podHostId }} }} }}"""
"""SkyPilot's mutation (sky/provision/runpod/api/pods.py)."""
PRICES = """query ($dc: String) {
  dataCenters { id listed } countryCodes
  gpuTypes(input: {id: "NVIDIA GeForce RTX 4090"}) {
    memoryInGb securePrice communityPrice secureSpotPrice communitySpotPrice
    here: lowestPrice(input: {gpuCount: 2, dataCenterId: $dc}) {
      minimumBidPrice uninterruptablePrice stockStatus minVcpu minMemory
    }
    nobody: lowestPrice(input: {gpuCount: 1, secureCloud: false, countryCode: "JP"}) {
      uninterruptablePrice stockStatus
    }
    community: lowestPrice(input: {gpuCount: 1, secureCloud: false, countryCode: "US"}) { uninterruptablePrice }
  }
}"""


@pytest.fixture(autouse=True)
def _endpoint(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_BASE_URL", clouds.url)
    monkeypatch.setattr(runpod, "api_key", "test-key")


def disk_usd_per_hour(gb: int) -> Decimal:
    return gb * Decimal("0.10") / 720


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await asyncio.to_thread(function, *args, **kwargs)


async def test_a_pod_lives_and_dies(clouds: Clouds, time: Time) -> None:
    clouds.control.hold_boots()
    made = await call(runpod.create_pod, "gb-x-head", "registry/image", L40S, ports="22/tcp,8266/http", env={"A": "b"})
    [pod] = await call(runpod.get_pods)
    assert (pod["id"], pod["desiredStatus"], pod["runtime"]) == (made["id"], "CREATED", None)
    clouds.control.release_boots()
    await clouds.world.reach(made["id"], "RUNNING")
    pod = await call(runpod.get_pod, made["id"])
    assert (pod["costPerHr"], pod["machine"]["gpuDisplayName"], pod["env"]) == (0.86, "L40S", ["A=b"])
    assert [(p["privatePort"], p["isIpPublic"]) for p in pod["runtime"]["ports"]] == [(22, True), (8266, False)]
    time.pass_by(1.2)
    await call(runpod.terminate_pod, made["id"])
    assert await call(runpod.get_pods) == []
    assert clouds.bill().usd("gb-x") == pytest.approx((Decimal("0.86") + disk_usd_per_hour(10)) * 2 / 3600)
    with pytest.raises(QueryError, match="not found"):
        await call(runpod.terminate_pod, made["id"])


async def test_a_spot_pod_is_bid_for_and_stays_ours_when_it_is_taken(clouds: Clouds, time: Time) -> None:
    args = "bash -c 'echo " + base64.b64encode(b"true; sleep infinity").decode() + " | base64 --decode > init.sh'"
    made = (await call(run_graphql_query, SPOT.format(bid=0.31, args=args)))["data"]["podRentInterruptable"]
    await clouds.world.reach(made["id"], "RUNNING")
    assert clouds.world.rented[made["id"]].spec.startup == "true; sleep infinity"
    time.pass_by(3600)
    await clouds.control.preempt(made["id"])
    time.pass_by(3600)
    pod = await call(runpod.get_pod, made["id"])
    assert (pod["desiredStatus"], pod["podType"], pod["runtime"]) == ("EXITED", "INTERRUPTABLE", None)
    assert clouds.bill().usd() == pytest.approx(Decimal("0.31") + disk_usd_per_hour(100)), "nothing since it was taken"
    assert list(clouds.bill().open()) == [made["id"]]


async def test_a_bid_below_the_floor_is_refused(clouds: Clouds) -> None:
    with pytest.raises(QueryError, match="below the minimum bid"):
        await call(run_graphql_query, SPOT.format(bid=0.25, args=""))
    clouds.control.price("runpod", L40S, 0.32, spot=True, at_next_sale=True)
    with pytest.raises(QueryError, match="below the minimum bid"):
        await call(run_graphql_query, SPOT.format(bid=0.31, args=""))
    assert clouds.bill().made() == 0


async def test_a_sold_out_gpu_is_refused(clouds: Clouds) -> None:
    clouds.control.capacity("runpod", L40S, 0)
    with pytest.raises(QueryError, match="no longer any instances available"):
        await call(runpod.create_pod, "gb-x-head", "registry/image", L40S)
    gpu = await call(runpod.get_gpu, L40S)
    assert (gpu["securePrice"], gpu["lowestPrice"]["uninterruptablePrice"]) == (0.86, None)


async def test_prices_by_place_and_tier(clouds: Clouds) -> None:
    asked = {"query": PRICES, "variables": {"dc": "EUR-IS-1"}}
    answer = await call(
        requests.post, f"{clouds.url}/graphql", json=asked, headers={"Authorization": "Bearer test-key"}
    )
    [gpu] = answer.json()["data"]["gpuTypes"]
    assert gpu["here"] == {
        "minimumBidPrice": 0.30, "uninterruptablePrice": 0.61, "stockStatus": "High", "minVcpu": 12, "minMemory": 82,
    }  # fmt: skip
    assert gpu["nobody"] == {"uninterruptablePrice": None, "stockStatus": None}
    assert gpu["community"] == {"uninterruptablePrice": 0.34}
    assert (gpu["securePrice"], gpu["communityPrice"]) == (0.59, 0.34)


async def test_keys_templates_and_registries(clouds: Clouds) -> None:
    await call(runpod.update_user_settings, "ssh-ed25519 AAAA one\n\nssh-ed25519 BBBB two\n")
    assert "BBBB" in (await call(runpod.get_user))["pubKey"]
    auth = await call(runpod.create_container_registry_auth, "auth", "me", "secret")
    await call(runpod.create_template, "t", "registry/image", registry_auth_id=auth["id"])
    await call(run_graphql_query, 'mutation {deleteTemplate(templateName: "t")}')
    await call(runpod.delete_container_registry_auth, auth["id"])
    made = await call(runpod.create_pod, "gb-x-head", "registry/image", L40S)
    keys = clouds.world.rented[made["id"]].spec.public_keys
    assert keys == ("ssh-ed25519 AAAA one", "ssh-ed25519 BBBB two")


async def test_the_wrong_gpu_can_be_sold(clouds: Clouds) -> None:
    clouds.control.sell_instead("runpod", "NVIDIA GeForce RTX 4090")
    made = await call(runpod.create_pod, "gb-x-head", "registry/image", L40S)
    assert (await call(runpod.get_pod, made["id"]))["machine"]["gpuDisplayName"] == "RTX 4090"


async def test_a_wrong_key_is_401(monkeypatch: pytest.MonkeyPatch, clouds: Clouds) -> None:
    monkeypatch.setattr(runpod, "api_key", "wrong")
    with pytest.raises(AuthenticationError):
        await call(runpod.get_pods)


async def test_an_unknown_field_or_argument_is_a_violation(clouds: Clouds) -> None:
    with pytest.raises(QueryError, match="Cannot query field 'prise'"):
        await call(run_graphql_query, "{ gpuTypes { prise } }")
    with pytest.raises(QueryError, match="bidPerGpu"):
        await call(run_graphql_query, 'mutation { podRentInterruptable(input: {name: "x"}) { id } }')
    assert len(clouds.violations) == 2
    clouds.violations.clear()


def test_a_start_command_without_skypilots_form_runs_unchanged() -> None:
    assert startup_of("python serve.py") == "python serve.py"
