"""A machine ends itself with the key that its cloud gave it, and can end no other machine."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from providers.common.machine_task import _script
from tests.clouds.bake import NoBake
from tests.clouds.emulator import Clouds
from tests.clouds.machines import NamespaceMachine, NamespaceMachines, NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.state import Rented

COPY = "export -p > /etc/profile.d/container_env_var.sh; sleep infinity"
"""Start command by which SkyPilot stores the environment of a pod's container."""
POD = """mutation { podFindAndDeployOnDemand(input: { name: "gb-x-head", imageName: "registry/image", gpuCount: 1,
  gpuTypeId: "NVIDIA L40S", cloudType: SECURE, dockerArgs: "%s" }) { id } }"""
TERMINATE = 'mutation { podTerminate(input: { podId: "%s" }) }'
STOP = {"GPUBROKER_WAY": "image", "GPUBROKER_SELF_STOP": "instance_key", "GPUBROKER_SELF_STOP_S": "0"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def headers(key: str = "test-key") -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def pod(clouds: Clouds) -> Rented:
    async with aiohttp.ClientSession(clouds.url, headers=headers()) as http:
        answer = await (await http.post("/graphql", json={"query": POD % COPY})).json()
    return await clouds.world.reach(answer["data"]["podFindAndDeployOnDemand"]["id"], "RUNNING")


async def instance(clouds: Clouds) -> Rented:
    offer = next(o for o in clouds.vast.offers.values() if o.gpu == "RTX 4090" and not o.rented)
    async with aiohttp.ClientSession(clouds.url, headers=headers()) as http:
        asked = {"client_id": "me", "image": "registry/image", "label": "gb-x-head", "disk": 20}
        answer = await (await http.put(f"/api/v0/asks/{offer.id}/", json=asked)).json()
    return await clouds.world.reach(str(answer["new_contract"]), "running")


async def test_a_pods_own_key_ends_this_pod_alone(clouds: Clouds) -> None:
    mine, other = await pod(clouds), await pod(clouds)
    key = mine.spec.env["RUNPOD_API_KEY"]
    async with aiohttp.ClientSession(clouds.url, headers=headers(key)) as http:

        async def ask(query: str) -> str:
            return str(await (await http.post("/graphql", json={"query": query})).json())

        assert "Unauthorized" in await ask(TERMINATE % other.id)
        assert "Unauthorized" in await ask("query { myself { pods { id } } }")
        assert "Unauthorized" in await ask(POD % COPY)
        assert other.gone_at is None
        assert "errors" not in await ask(TERMINATE % mine.id)
        assert mine.gone_at is not None
        assert "Unauthorized" in await ask(TERMINATE % mine.id), "the key ends with the pod"
    assert clouds.bill().open() == [other.id]


async def test_an_instances_own_key_ends_this_instance_alone(clouds: Clouds) -> None:
    mine, other = await instance(clouds), await instance(clouds)
    key = mine.spec.env["CONTAINER_API_KEY"]
    async with aiohttp.ClientSession(clouds.url, headers=headers(key)) as http:
        assert (await http.delete(f"/api/v0/instances/{other.id}/", json={})).status == 401
        assert (await http.get("/api/v1/instances/")).status == 401
        assert (await http.delete(f"/api/v0/instances/{mine.id}/", json={})).status == 200
        assert (await http.delete(f"/api/v0/instances/{mine.id}/", json={})).status == 401
    assert (mine.gone_at is None, other.gone_at is None) == (False, True)


@pytest.fixture
async def rented() -> AsyncIterator[Clouds]:
    """Yield the clouds with real machines, which reach them at the same address as this test."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    try:
        machines = await NamespaceMachines.open(forwards={port: port})
    except (NoBake, NoNamespaces) as e:
        cannot(e)
    async with Clouds(machines, port=port) as clouds:
        yield clouds
        assert clouds.violations == []


@pytest.mark.parametrize("sell", [pod, instance])
async def test_a_machine_whose_trainer_ended_ends_itself(rented: Clouds, sell: object) -> None:
    assert callable(sell)
    mine, other = await sell(rented), await sell(rented)
    inside = mine.machine
    assert isinstance(inside, NamespaceMachine)
    env = STOP | {"GPUBROKER_SELF_STOP_URL": rented.url, "PATH": PATH}
    try:
        _, said = await inside.run("/bin/bash", "-c", _script("run.sh"), env=env)
    except ConnectionError:
        said = ""  # it was gone before it could say how it ended
    assert mine.gone_at is not None, said
    assert list(rented.bill().open()) == [other.id]
    assert inside.root is not None
    copy = Path(inside.root) / "etc/profile.d/container_env_var.sh"
    assert not copy.exists() or copy.stat().st_mode & 0o077 == 0
