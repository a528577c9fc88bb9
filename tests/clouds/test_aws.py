"""Emulated AWS: EC2's API and the machines behind it agree."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.ec2.models.instances import Instance

from tests.clouds.aws import PROXY, TAG, Aws
from tests.clouds.bake import NoBake
from tests.clouds.bill import Bill
from tests.clouds.conftest import Time
from tests.clouds.imds import INSTANCE_ACTION
from tests.clouds.machine import PaperMachines
from tests.clouds.machines import NamespaceMachines, NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.state import Rented, World
from tests.clouds.wait import until

EAST = "us-east-1"
USER_DATA = """#cloud-config
users:
  - name: ubuntu
    shell: /bin/bash
    ssh_authorized_keys:
      - |-
        {key}
"""
ASK_IMDS = """
token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token)
curl -s -w ' %{http_code}' -H "X-aws-ec2-metadata-token: $token" http://169.254.169.254"""


@dataclass(frozen=True, kw_only=True)
class Account:
    aws: Aws
    world: World
    key: Path

    def ec2(self) -> Any:
        return boto3.client(
            "ec2", region_name=EAST, endpoint_url=self.aws.url, aws_access_key_id="x", aws_secret_access_key="y"
        )

    async def launch(self, *, spot: bool = False, **more: Any) -> Rented:
        machine = await self.rent(spot=spot, **more)
        return await self.world.reach(machine.id, "running")

    async def rent(self, *, spot: bool = False, **more: Any) -> Rented:
        """Rent an instance with SkyPilot's request."""
        wanted: dict[str, Any] = {"ImageId": self.aws.images[EAST], "InstanceType": "g6e.xlarge", "MinCount": 1}
        wanted |= {"MaxCount": 1, "UserData": USER_DATA.format(key=self.key.with_suffix(".pub").read_text().strip())}
        wanted |= {"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": TAG, "Value": "gb-x-0123"}]}]}
        wanted |= {"Placement": {"AvailabilityZone": f"{EAST}a"}, **more}
        if spot:
            wanted["InstanceMarketOptions"] = {"MarketType": "spot"}
        found = await asyncio.to_thread(lambda: self.ec2().run_instances(**wanted))
        return self.world.rented[found["Instances"][0]["InstanceId"]]

    async def described(self, machine: Rented) -> Any:
        found = await asyncio.to_thread(lambda: self.ec2().describe_instances(InstanceIds=[machine.id]))
        return found["Reservations"][0]["Instances"][0]

    async def ssh(self, machine: Rented, command: str) -> tuple[int, str]:
        options = ("BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR",
                   f"ProxyCommand={sys.executable} {PROXY} {self.aws.url} %h")  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            "ssh", "-F", "none", "-i", str(self.key), *(f"-o{option}" for option in options),
            f"ubuntu@{(await self.described(machine))['PublicIpAddress']}", command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()


async def make_key(folder: Path) -> Path:
    key = folder / "key"
    keygen = await asyncio.create_subprocess_exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    assert await keygen.wait() == 0
    return key


@pytest.fixture(scope="module")
async def account(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Account]:
    """Yield an account with real machines."""
    try:
        world = World(await NamespaceMachines.open())
    except (NoNamespaces, NoBake) as e:
        cannot(e)
    async with Aws(world) as aws:
        aws.front.spot[("g6e.xlarge", f"{EAST}a")] = "0.60"
        aws.front.on_demand[("g6e.xlarge", EAST)] = "1.861"
        try:
            yield Account(aws=aws, world=world, key=await make_key(tmp_path_factory.mktemp("key")))
        finally:
            await world.close()


async def test_a_launched_instance_is_a_machine_that_its_key_opens(account: Account) -> None:
    machine = await account.launch()
    assert await account.ssh(machine, "whoami; sudo whoami; ls /usr/bin/docker") == (
        0,
        "ubuntu\nroot\n/usr/bin/docker\n",
    )


async def test_the_metadata_service_speaks_version_2_only(account: Account) -> None:
    machine = await account.launch(spot=True)
    assert await account.ssh(machine, f"{ASK_IMDS}/latest/meta-data/instance-id") == (0, f"{machine.id} 200")
    assert await account.ssh(machine, f"{ASK_IMDS}/latest/meta-data/instance-life-cycle") == (0, "spot 200")
    assert await account.ssh(machine, f"{ASK_IMDS}{INSTANCE_ACTION}") == (0, " 404")
    without = "curl -s -o /dev/null -w '%{http_code}' http://169.254.169.254/latest/meta-data/instance-id"
    assert await account.ssh(machine, without) == (0, "401")


async def test_terminate_kills_the_machine_process(account: Account) -> None:
    machine = await account.launch()
    await asyncio.to_thread(lambda: account.ec2().terminate_instances(InstanceIds=[machine.id]))
    assert machine.machine is not None
    assert not machine.machine.alive
    assert machine.gone_at is not None
    assert (await account.described(machine))["State"]["Name"] == "terminated"
    script = await asyncio.create_subprocess_exec(
        sys.executable, str(PROXY), account.aws.url, machine.request["PublicIpAddress"], stderr=asyncio.subprocess.PIPE
    )
    _, said = await script.communicate()
    assert (script.returncode, "no machine answers" in said.decode()) == (1, True)


async def test_a_preemption_gives_notice_and_then_takes_the_machine(account: Account) -> None:
    machine = await account.launch(spot=True)
    await account.aws.preempt(machine.id, notice_s=2)
    code, said = await account.ssh(machine, f"{ASK_IMDS}{INSTANCE_ACTION}")
    assert (code, said[-4:]) == (0, " 200")
    assert json.loads(said[:-4])["action"] == "terminate"
    booted = machine.machine
    assert booted is not None
    assert booted.alive
    await until(lambda: not booted.alive)
    found = await account.described(machine)
    assert (found["State"]["Name"], found["StateReason"]["Code"]) == ("terminated", "Server.SpotInstanceTermination")
    assert machine.id not in Bill(account.world.events, account.world.now()).open()


@pytest.mark.parametrize(("behaviour", "status"), [("terminate", "terminated"), ("stop", "stopped")])
async def test_shutting_itself_down_ends_or_stops_it(account: Account, behaviour: str, status: str) -> None:
    machine = await account.launch(InstanceInitiatedShutdownBehavior=behaviour)
    await account.ssh(machine, "sudo shutdown -h now")
    await account.world.reach(machine.id, status)
    found = await account.described(machine)
    assert (found["State"]["Name"], found["StateReason"]["Code"].split(".")[0]) == (status, "Client")


async def test_a_stopped_instance_starts_again(account: Account) -> None:
    machine = await account.launch()
    await asyncio.to_thread(lambda: account.ec2().stop_instances(InstanceIds=[machine.id]))
    assert machine.status == "stopped"
    await asyncio.to_thread(lambda: account.ec2().start_instances(InstanceIds=[machine.id]))
    await account.world.reach(machine.id, "running")
    assert (await account.ssh(machine, "whoami"))[0] == 0


async def test_the_bill_is_at_the_price_of_the_zone_and_counts_the_disk(tmp_path: Path) -> None:
    world = World(PaperMachines())
    async with Aws(world) as aws:
        aws.front.spot[("g6e.xlarge", f"{EAST}a")] = "0.60"
        aws.front.disk[EAST] = "0.08"
        account = Account(aws=aws, world=world, key=await make_key(tmp_path))
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 90, "VolumeType": "gp3"}}
        machine = await account.launch(spot=True, BlockDeviceMappings=[disk])
        assert machine.usd_per_hour == Decimal("0.60")
        assert machine.storage_usd_per_hour == Decimal("0.08") * 90 / 720
        assert machine.name == "gb-x-0123"
    await world.close()


async def test_instances_in_state_running_are_billed_before_their_machine_is_up(tmp_path: Path, time: Time) -> None:
    world = World(PaperMachines(), now=lambda: time.now)
    world.boots.clear()
    async with Aws(world) as aws:
        aws.front.on_demand[("g6e.xlarge", EAST)] = "3.6"
        account = Account(aws=aws, world=world, key=await make_key(tmp_path))
        machine = await account.rent()

        async def bill() -> tuple[str, Decimal]:
            time.pass_by(1000)
            return (await account.described(machine))["State"]["Name"], Bill(world.events, time.now).usd()

        assert await bill() == ("running", Decimal(1))
        await asyncio.to_thread(lambda: account.ec2().stop_instances(InstanceIds=[machine.id]))
        assert await bill() == ("stopped", Decimal(1))
        await asyncio.to_thread(lambda: account.ec2().start_instances(InstanceIds=[machine.id]))
        assert await bill() == ("running", Decimal(2))
    await world.close()


async def test_an_instance_in_creation_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto marks an instance as spot only after it has created the disks."""
    being_made, answered, add_disk = threading.Event(), threading.Event(), Instance.add_block_device

    def slowly(*args: Any, **more: Any) -> None:
        being_made.set()
        answered.wait(2)  # by far enough for an answer that does not wait its turn
        add_disk(*args, **more)

    monkeypatch.setattr(Instance, "add_block_device", slowly)
    world = World(PaperMachines())
    async with Aws(world) as aws:
        account = Account(aws=aws, world=world, key=await make_key(tmp_path))
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 90, "VolumeType": "gp3"}}
        rent = asyncio.create_task(account.rent(spot=True, BlockDeviceMappings=[disk]))
        await asyncio.to_thread(being_made.wait, 60)
        shown = await asyncio.to_thread(lambda: account.ec2().describe_instances())
        answered.set()
        machine = await rent
        [found] = [
            one for each in shown["Reservations"] for one in each["Instances"] if one["InstanceId"] == machine.id
        ]
        assert (found.get("InstanceLifecycle"), len(found["BlockDeviceMappings"])) == ("spot", 1)
    await world.close()
