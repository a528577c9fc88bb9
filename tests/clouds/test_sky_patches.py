"""Our plugin's patches of SkyPilot, alone and in a separate process."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
    """The placement groups that the machines of those clusters would be asked for in, in order."""
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
    """A launch leaves the placement group of another that is still empty."""
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
        ({PIN: "{}"}, "(False, False, False, True, True)\ngpubroker: SkyPilot has no address of what it launched\n"),
    ],
    ids=["of-others", "ours"],
)
def test_only_our_launches_do_without_skypilots_runtime(env: dict[str, str], expected: str, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sky_python(), "-c", READY], env={**home, **env}, capture_output=True, text=True)
    assert done.stdout == expected, done.stderr
