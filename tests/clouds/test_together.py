"""The clouds' APIs and real machines: a created machine answers by ssh, and a preempted one is dead."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.clouds.bake import NoBake
from tests.clouds.emulator import Clouds
from tests.clouds.machines import NamespaceMachines, NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.state import Rented

RENT = "mutation ($asked: PodRentInterruptableInput!) { podRentInterruptable(input: $asked) { id } }"


@pytest.fixture
async def real_clouds() -> AsyncIterator[Clouds]:
    try:
        machines = await NamespaceMachines.open()
    except (NoNamespaces, NoBake) as e:
        cannot(e)
    async with Clouds(machines) as clouds:
        yield clouds
        assert clouds.violations == []


@pytest.fixture
async def key(tmp_path: Path) -> Path:
    keygen = await asyncio.create_subprocess_exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    assert await keygen.wait() == 0
    return tmp_path / "key"


async def ssh(rented: Rented, key: Path, command: str) -> tuple[int, str]:
    options = ("BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
    process = await asyncio.create_subprocess_exec(
        "ssh", "-F", "none", "-i", key, "-p", str(rented.spec.ssh_port), *(f"-o{option}" for option in options),
        f"{rented.spec.user}@{rented.spec.ip}", command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), 300)
    return process.returncode or 0, said.decode().strip()


async def create(clouds: Clouds, public: str) -> tuple[str, str, str]:
    """Create one machine at RunPod, Vast and Lambda, and pass the key to each in its own way."""
    script = f'mkdir -p ~/.ssh; echo "{public}" >> ~/.ssh/authorized_keys; sleep infinity'
    encoded = base64.b64encode(script.encode()).decode()
    pod = {"name": "gb-a", "gpuTypeId": "NVIDIA L40S", "bidPerGpu": 0.3, "env": [{"key": "NAME", "value": "worth"}],
           "dockerArgs": f"bash -c 'echo {encoded} | base64 --decode > init.sh; bash init.sh'"}  # fmt: skip
    async with aiohttp.ClientSession(clouds.url, headers={"Authorization": "Bearer test-key"}) as http:

        async def call(method: str, path: str, body: Any) -> Any:
            async with http.request(method, path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        runpod = await call("POST", "/graphql", {"query": RENT, "variables": {"asked": pod}})
        await call("POST", "/api/v0/ssh/", {"ssh_key": public})
        ask = {"image": "i", "label": "gb-b", "onstart": "touch ~/.no_auto_tmux", "price": 0.2}
        vast = await call("PUT", "/api/v0/asks/70010/", ask)
        await call("POST", "/api/v1/ssh-keys", {"name": "k", "public_key": public})
        asked = {"region_name": "us-east-1", "instance_type_name": "gpu_1x_h100_sxm5", "ssh_key_names": ["k"]}
        lambdas = await call("POST", "/api/v1/instance-operations/launch", asked)
    pod_id = runpod["data"]["podRentInterruptable"]["id"]
    return str(pod_id), str(vast["new_contract"]), str(lambdas["data"]["instance_ids"][0])


async def test_machines_of_all_clouds_answer_until_they_are_taken(real_clouds: Clouds, key: Path) -> None:
    pod, vast, instance = await create(real_clouds, key.with_suffix(".pub").read_text().strip())
    rented = await real_clouds.world.reach(pod, "RUNNING", within_s=60)
    assert await ssh(rented, key, "whoami") == (0, "root")
    assert await ssh(await real_clouds.world.reach(vast, "running", within_s=60), key, "ls ~/.no_auto_tmux") == (
        0, "/root/.no_auto_tmux",
    )  # fmt: skip
    assert await ssh(await real_clouds.world.reach(instance, "active", within_s=60), key, "whoami") == (0, "ubuntu")
    await real_clouds.control.preempt(pod)
    assert (await ssh(rented, key, "whoami"))[0] == 255
    assert rented.status == "EXITED"
