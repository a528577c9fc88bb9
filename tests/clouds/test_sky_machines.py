"""SkyPilot's whole launch on a real machine of each emulated cloud: the task runs, and no other file arrives."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, Liveness, TrainerImage
from providers.common.cloud import Purchase
from providers.common.machine_task import MachineTask, task_of
from providers.skypilot.launcher import SkyLauncher
from tests.clouds.aws import Aws
from tests.clouds.bake import NoBake
from tests.clouds.emulator import Clouds
from tests.clouds.machines import NamespaceMachine, NamespaceMachines, NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.sky_rig import AWS_KEY, KEY, PLAIN, TASK, launcher, name, of_lambda, of_runpod, of_vast, processes
from tests.clouds.state import Rented
from tests.clouds.wait import GUARD_S

TASK_SECRET = TASK.secrets["SECRET_WORD"]
LARGE = 5_000_000
NEW_HOST_KEYS = "rm /etc/ssh/ssh_host_*; ssh-keygen -A && pkill -HUP -o sshd"


def of_aws() -> Purchase:
    row = {
        "InstanceType": "g6e.xlarge", "AcceleratorName": "L40S", "AcceleratorCount": "1", "vCPUs": "4",
        "MemoryGiB": "32", "Price": "1.861", "SpotPrice": "0.6", "Region": "us-east-1", "AvailabilityZone": "use1-az6",
        "Arch": "x86_64",
    }  # fmt: skip
    return Purchase(
        cloud="aws", region="us-east-1", zone="us-east-1a", instance_type="g6e.xlarge", use_spot=True,
        catalog={"aws/vms.csv": [row]}, config={"aws": {"disk_encrypted": True, "remote_identity": "NO_UPLOAD"}},
    )  # fmt: skip


@pytest.fixture(scope="module")
async def sky_clouds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Clouds, Aws, SkyLauncher]]:
    state = tmp_path_factory.mktemp("sky")
    async with AsyncExitStack() as stack:
        try:
            machines = await NamespaceMachines.open()
        except (NoBake, NoNamespaces) as e:
            cannot(e)
        clouds = await stack.enter_async_context(Clouds(machines))
        clouds.control.capacity("lambda", "gpu_1x_h100_pcie", 4)  # a test's machine is kept until all tests have run
        aws = await stack.enter_async_context(Aws(clouds.world))
        sky = launcher(state, clouds, env={**aws.environment, **AWS_KEY}, config=dict(aws.sky_config))
        aws.write_catalog(state / "sky/home/.sky/catalogs/v8/aws")
        yield clouds, aws, sky
        await sky.stop()
        assert processes(state) == {}
        assert clouds.violations == []


def purchase(clouds: Clouds, cloud: str) -> tuple[Purchase, MachineTask]:
    match cloud:
        case "lambda":
            return of_lambda(), PLAIN
        case "runpod":
            return of_runpod(), TASK
        case "vast":
            [offer, *_] = [o for o in clouds.vast.offers.values() if o.gpu == "RTX 4090" and not o.rented and o.min_bid]
            return of_vast(str(offer.id), offer.min_bid + 0.01), TASK
    return of_aws(), PLAIN


@pytest.mark.parametrize("cloud", ["lambda", "runpod", "vast", "aws"])
async def test_a_launch_runs_the_task_and_brings_no_key(
    sky_clouds: tuple[Clouds, Aws, SkyLauncher], cloud: str
) -> None:
    clouds, _, sky = sky_clouds
    mine = name(cloud[0])
    await sky.launch(mine, *purchase(clouds, cloud))
    assert await sky.liveness(sky.id, mine) is Liveness.DEAD
    [machine] = clouds.world.named(mine)
    way = await sky.ssh(mine, tty=False)
    said = await asyncio.to_thread(
        subprocess.run, [*way, "until test -s ran; do sleep 0.1; done; cat ran; sudo -n true && ls -A ~/.ssh"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert said.stdout.startswith(f"hello {TASK_SECRET}"), said
    given = {"aws": "yes"}.get(cloud, "accept-new")  # AWS passes a host key on to the machine
    assert f"StrictHostKeyChecking={given}" in way
    assert "sky-cluster-key" not in said.stdout
    assert await heard(sky, mine) is True
    assert machine.machine is not None
    assert machine.machine.root is not None
    assert leaks(machine.machine.root) == []
    assert all(secret not in str(machine.request) for secret in (*AWS_KEY.values(), TASK_SECRET))
    assert KEY not in str(machine.request)


async def test_a_machine_with_another_host_key_is_not_spoken_to(
    sky_clouds: tuple[Clouds, Aws, SkyLauncher],
) -> None:
    """The first contact pins the host key. A machine with another key gets no command and is reported."""
    clouds, _, sky = sky_clouds
    mine = name("k")
    await sky.launch(mine, of_lambda(), PLAIN)
    way = await sky.ssh(mine, tty=False)
    assert (await asyncio.to_thread(subprocess.run, [*way, "true"], capture_output=True)).returncode == 0
    [rented] = clouds.world.named(mine)
    assert isinstance(rented.machine, NamespaceMachine)
    code, output = await rented.machine.run("sh", "-c", NEW_HOST_KEYS)
    assert code == 0, output
    for _ in range(25):  # the former process answers until the signal arrives
        said = await asyncio.to_thread(subprocess.run, [*way, "true"], capture_output=True, text=True)
        if "Host key verification failed" in said.stderr:
            break
        await asyncio.sleep(0.2)
    assert "Host key verification failed" in said.stderr
    assert said.returncode == 255
    told = await sky.started(mine)
    assert isinstance(told, str)
    assert "shows another host key than the pinned one" in told
    other = name("l")
    await sky.launch(other, of_lambda(), PLAIN)
    assert (await asyncio.to_thread(subprocess.run, [*await sky.ssh(other, tty=False), "true"])).returncode == 0
    await sky.forget(mine)


async def test_joined_machines_know_their_rank_and_where_the_first_is(
    sky_clouds: tuple[Clouds, Aws, SkyLauncher],
) -> None:
    clouds, _, sky = sky_clouds
    mine = name("j")
    task = replace(PLAIN, nodes=2, run='echo "$SKYPILOT_NODE_RANK" $SKYPILOT_NODE_IPS >~/rank; hostname -I >>~/rank')
    await sky.launch(mine, of_lambda(), task)
    assert await heard(sky, mine) is True, "both have ended well"
    told = sorted([_home(machine) / "rank" for machine in clouds.world.named(mine)], key=Path.read_text)
    (zero, own_zero), (one, own_one) = (path.read_text().splitlines() for path in told)
    assert (zero.split()[0], one.split()[0]) == ("0", "1")
    assert zero.split()[1:] == one.split()[1:], "all receive the same order"
    addresses = zero.split()[1:]
    assert addresses[0] in own_zero.split()
    assert addresses[1] in own_one.split()


def _home(rented: Rented) -> Path:
    assert rented.machine is not None
    assert rented.machine.root is not None
    return rented.machine.root / "home/ubuntu"


async def test_an_image_that_cannot_be_pulled_is_reported(sky_clouds: tuple[Clouds, Aws, SkyLauncher]) -> None:
    """SkyPilot's launch has succeeded by then."""
    _, _, sky = sky_clouds
    mine = name("i")
    image = f"registry.example/trainer@sha256:{'dead' * 16}"
    boot = BootSpec(secret_env={"SECRET_WORD": "manifest"}, trainer=TrainerImage(reference=image))
    await sky.launch(mine, of_lambda(), task_of(boot, docker_run=True))
    assert await heard(sky, mine) == (
        f"cannot pull {image}; check trainer.image, and the registry's login if it is private "
        f"(output: Error response from daemon: *** for {image} not found: *** unknown)"
    )


async def heard(sky: SkyLauncher, mine: InstanceName) -> bool | str:
    async with asyncio.timeout(GUARD_S):
        while True:
            if said := await sky.started(mine):
                return said
            await asyncio.sleep(1)


def leaks(disk: Path) -> list[str]:
    """Return files on the machine's disk that hold an account's key, or the key of all its machines."""
    found = []
    for path in disk.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < LARGE:
            content = path.read_bytes()
            if any(key.encode() in content for key in (KEY, *AWS_KEY.values())) or b"OPENSSH PRIVATE KEY" in content:
                found.append(str(path.relative_to(disk)))
    return [path for path in found if not path.startswith("etc/ssh/")]
