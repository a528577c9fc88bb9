"""Our plugin's patches of SkyPilot, alone and in a separate process."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from providers.skypilot.environment import find_python
from providers.skypilot.plugin import __file__ as patches_folder
from providers.skypilot.plugin.shared import PIN
from tests.support.skypilot import sky_python
from tests.unit.providers.aws_front import Front, front, moto_server

BOOTSTRAP = """
import json, sys
from types import SimpleNamespace
from gpubroker_skypilot.aws_patches import machine_as_bought

for cluster in sys.argv[1:]:
    asked = SimpleNamespace(node_config={"BlockDeviceMappings": []})
    made = machine_as_bought(lambda region, cluster, config: config)("us-east-1", cluster, asked)
    print(json.dumps(made.node_config["Placement"]["GroupName"]))
"""
"""SkyPilot's steps for each cluster right before it asks AWS for its machines."""
OURS = "gb-aaaa-"
ONE, TWO, GONE, FULL = (f"{OURS}{letter * 13}-1a2b3c4d" for letter in "bcde")


@pytest.fixture
async def aws() -> AsyncIterator[tuple[Front, str]]:
    with moto_server() as moto:
        async with front(moto) as made:
            yield made


async def bootstrapped(home: Path, url: str, *clusters: str) -> list[str]:
    """Return the placement groups in which the clusters' machines would be requested, in order."""
    env = {
        "HOME": str(home), "PATH": os.environ["PATH"],
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "emulated", "AWS_SECRET_ACCESS_KEY": "emulated",
        PIN: json.dumps({"placement_group": OURS}),
    }  # fmt: skip
    done = await asyncio.to_thread(
        subprocess.run, [sky_python(), "-c", BOOTSTRAP, *clusters], env=env, capture_output=True, text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_launch_keeps_the_empty_placement_group_of_another_launch(aws: tuple[Front, str], tmp_path: Path) -> None:
    made, url = aws
    one, two, again = await bootstrapped(tmp_path, url, ONE, TWO, TWO)
    assert one.startswith(ONE)
    assert two.startswith(TWO)
    assert set(made.groups) == {one, again}, "the first launch's machines are yet to be asked for"


async def test_placement_groups_of_machines_that_are_gone_are_deleted(aws: tuple[Front, str], tmp_path: Path) -> None:
    made, url = aws
    old = int(time.time()) - 7200
    theirs, gone, full = f"gb-bbbb-{'a' * 13}-1a2b3c4d-{old}", f"{GONE}-{old}", f"{FULL}-{old}"
    made.groups |= {theirs: [], gone: [], full: ["i-1"], "somebody-elses": []}
    [one] = await bootstrapped(tmp_path, url, ONE)
    assert set(made.groups) == {theirs, full, "somebody-elses", one}


READY = """
from sky.provision.common import ProvisionRecord
from gpubroker_skypilot.task_start import started_over_ssh, without_runtime_setup

def left(record):
    done = without_runtime_setup(record).runtime_metadata
    return (done.has_ray, done.has_skylet, done.has_job_queue, done.runtime_setup_done, done.setup_done)

execute = started_over_ssh(lambda *given: given)
print(left(ProvisionRecord("aws", "r", None, "c", "i", [], [])))
try:
    print(execute("self", "handle", "task", True))
except RuntimeError as e:
    print(e)
"""
"""Setup of a launch's machines by SkyPilot, and the start of its task."""


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "(True, True, True, False, False)\n('self', 'handle', 'task', True)\n"),
        (
            {PIN: "{}"},
            "(False, False, False, True, True)\ngpubroker: SkyPilot has no address of the machine that it launched\n",
        ),
    ],
    ids=["of-others", "ours"],
)
def test_only_our_launches_do_without_skypilots_runtime(env: dict[str, str], expected: str, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sky_python(), "-c", READY], env={**home, **env}, capture_output=True, text=True)
    assert done.stdout == expected, done.stderr


PODS = """
import json, os
from gpubroker_skypilot import patches
from sky.adaptors import runpod as adaptor
from sky.provision.runpod import utils
import runpod

asked = []
runpod.get_gpu = lambda gpu_id: {"memoryInGb": 24}
runpod.create_pod = lambda **kwargs: asked.append(kwargs) or {"id": "p"}
utils.runpod_commands.create_spot_pod = lambda **kwargs: asked.append(kwargs) or {"id": "p"}
for spot in (False, True):
    patches._pod_as_bought(utils.launch)(
        cluster_name="c", node_type="head", instance_type="1x_RTX4090_COMMUNITY", region="US", zone="community",
        disk_size=100, image_name="i", ports=None, public_key="k", preemptible=spot, bid_per_gpu=0.3,
        docker_login_config=None,
    )
request = patches._with_cuda_floor(lambda method, path, body, **kwargs: asked.append(body))
request("POST", "/pods", json={"gpu": {"id": "g"}})
request("POST", "/templates", json={"name": "t"})
print(json.dumps([asked, patches._rest_base("https://api.runpod.io/v2"), patches._rest_base(adaptor._REST_BASE)]))
"""
"""SkyPilot's creates of one community pod, on demand and spot, and the creates of its next version."""


def test_runpod_pods_have_the_purchases_cuda_versions(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "gpubroker_skypilot").symlink_to(Path(patches_folder).parent)
    env = {
        "HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(plugin),
        "RUNPOD_API_BASE_URL": "http://127.0.0.1:9", PIN: json.dumps({"cuda_min": "12.6", "cuda": "12.6,12.8"}),
    }  # fmt: skip
    done = subprocess.run(
        [str(find_python(None, tmp_path)), "-c", PODS], env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    (fixed, spot, created, template), new, old = json.loads(done.stdout.splitlines()[-1])
    assert [one["allowed_cuda_versions"] for one in (fixed, spot)] == [["12.6", "12.8"]] * 2
    assert (fixed["data_center_id"], spot["data_center_id"]) == (None, None)
    assert (created, template) == ({"gpu": {"id": "g", "minCudaVersion": "12.6"}}, {"name": "t"})
    assert (new, old) == ("http://127.0.0.1:9/v2", "http://127.0.0.1:9/v1")
