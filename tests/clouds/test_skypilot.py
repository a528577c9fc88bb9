"""SkyPilot's own provisioners of RunPod and Vast, unmodified, on the emulators, in a process of their own."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.emulator import Clouds
from tests.support.skypilot import run_in_skypilot

SCRIPT = """
import importlib, json, sys
from sky import authentication
from sky.provision import common
cloud, asked = sys.argv[1], json.loads(sys.argv[2])
instance = importlib.import_module(f"sky.provision.{cloud}.instance")
getattr(authentication, f"setup_{cloud}_authentication")({"auth": {"ssh_user": "root"}})
config = common.ProvisionConfig(
    provider_config=asked["provider"], authentication_config={"ssh_public_key": asked.get("key")}, docker_config={},
    node_config=asked["node"], count=1, tags={}, resume_stopped_nodes=False, ports_to_open_on_launch=None,
)
record = instance.run_instances(asked["region"], "gb-x", "gb-x-0123", config)
info = instance.get_cluster_info(asked["region"], "gb-x-0123").get_head_instance()
query = lambda: {k: v[0] and v[0].value for k, v in instance.query_instances("gb-x", "gb-x-0123", {}, False).items()}
before = query()
instance.terminate_instances("gb-x-0123")
print(json.dumps({"id": record.head_instance_id, "host": info.external_ip, "port": info.ssh_port,
                  "before": before, "after": query()}))
"""
RUNPOD: dict[str, Any] = {
    "region": "US",
    "provider": {"availability_zone": "US-GA-1"},
    "node": {
        "InstanceType": "1x_L40S_SECURE", "DiskSize": 100, "ImageId": "registry/image",
        "PublicKey": "ssh-ed25519 AAAA us", "Preemptible": True, "BidPerGPU": 0.31,
    },
}  # fmt: skip
VAST: dict[str, Any] = {
    "region": "Sweden, SE, EU",
    "provider": {"create_instance_kwargs": {"price": 0.5}},
    "node": {"InstanceType": "1x-L40S-32-65536", "DiskSize": 100, "ImageId": "registry/image", "Preemptible": True},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return credentials as the clouds' own tools keep them."""
    for name, text in (
        (".runpod/config.toml", '[default]\napi_key = "test-key"\n'),
        (".config/vastai/vast_api_key", "test-key"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


async def skypilot(clouds: Clouds, home: Path, cloud: str, asked: dict[str, Any]) -> dict[str, Any]:
    words = (SCRIPT, cloud, json.dumps(asked))
    output = await asyncio.to_thread(run_in_skypilot, *words, home=home, env=clouds.environment)
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


async def test_a_spot_pod_is_bought_at_its_bid(clouds: Clouds, home: Path) -> None:
    said = await skypilot(clouds, home, "runpod", RUNPOD)
    [pod] = clouds.world.named("gb-x")
    assert (said["id"], said["host"], said["port"]) == (pod.id, pod.spec.ip, pod.spec.ssh_port)
    assert (pod.name, pod.spot, str(pod.usd_per_hour), pod.gpu) == ("gb-x-0123-head", True, "0.31", "NVIDIA L40S")
    assert "service ssh restart" in pod.spec.startup
    assert [key.split()[0] for key in pod.spec.public_keys] == ["ssh-rsa"]
    assert (list(said["before"].values()), said["after"]) == (["UP"], {})
    assert list(clouds.bill().open()) == []


async def test_vasts_first_of_the_offers_asked_for(clouds: Clouds, home: Path) -> None:
    """Vast's own SDK drops every filter of this search; our client keeps them."""
    said = await skypilot(clouds, home, "vast", VAST)
    [machine] = clouds.world.named("gb-x")
    assert (said["id"], said["host"], said["port"]) == (machine.id, machine.spec.ip, machine.spec.ssh_port)
    assert (machine.spot, machine.gpu) == (True, "L40S")
    assert 'echo "test-key" > ~/.vast_api_key' in machine.spec.startup, "SkyPilot sends the account's key"
    assert machine.spec.env["__SOURCE"] == "skypilot"
    assert (list(said["before"].values()), said["after"]) == (["UP"], {})
    assert list(clouds.bill().open()) == []
