"""The rented clouds as `provider_laws.World`: the real providers on emulators of the clouds' APIs.

Tests of a broker's decisions use `tests.support.rig.simulated_cloud`, which is faster and takes faults.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import boto3
from botocore.config import Config as BotoConfig
from botocore.exceptions import ClientError
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends

from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import BootSpec, TrainerImage
from broker.domain.job import Handle
from broker.domain.offer import Offer
from broker.ports import Provider
from providers.aws.api import error_for_exception
from providers.aws.provider import AwsCloud, AwsConfig
from providers.common.account_guard import Account
from providers.common.cloud import CloudProvider, Purchase
from providers.common.machine_task import MachineTask
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from providers.runpod.market import SKY_NAMES
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.vast.provider import VastCloud, VastConfig
from tests.clouds.aws import TAG, Aws
from tests.clouds.emulator import Clouds
from tests.clouds.paper import USER, Agents, FarBlobs, Host, PaperLauncher, Server
from tests.clouds.state import Rented
from tests.clouds.warp import Life, LoopClock, MortalCloud, Point, ReleasingClock, held
from tests.conformance.provider_laws import OURS, Trouble

KINDS = ("runpod", "vast", "lambda", "aws")
EAST = "us-east-1"
IMAGE = TrainerImage(reference="registry.example/trainer@sha256:" + "0" * 64)
EVER = 10**6
CREATING = {
    "lambda": ("launch",),
    "runpod": ("podRentInterruptable", "podFindAndDeployOnDemand"),
    "vast": ("create-instance",),
}
ANOTHER = {"lambda": "gpu_1x_a100_sxm4", "runpod": "NVIDIA RTX A6000", "vast": "70050", "aws": "p5.48xlarge"}
"""Offer that a cloud sells instead of the requested one, by cloud; its GPU differs from the cloud's first offer."""
NEVER = {"lambda": "0" * 32, "runpod": "neverwas", "vast": "999999", "aws": "i-0123456789abcdef0"}
KEYS = {"aws_access_key_id": "AKIATESTTESTTEST", "aws_secret_access_key": "secret-of-the-test"}
QUOTAS = {"Running On-Demand G and VT instances": 64.0, "All G and VT Spot Instance Requests": 64.0}


class NoAgents(Agents):
    """Agents that do not exist, for clouds whose machines run nothing."""

    def start(self, rented: Rented, attempt: str) -> None:
        self.started[attempt] += 1


class LaunchServer(Server):
    """Launch server of all four clouds. On AWS it uses boto3 and sets SkyPilot's tags in the create call."""

    def __init__(self, number: int, clouds: Clouds, agents: Agents, point: Point, aws: Aws | None) -> None:
        super().__init__(number, clouds, agents, point)
        self.instead: str | None = None
        self.reply_lost = False
        if aws is not None:
            self._image = aws.images[EAST]
            self._ec2: Any = boto3.client(
                "ec2", region_name=EAST, endpoint_url=aws.url, config=BotoConfig(retries={"total_max_attempts": 1}),
                **KEYS,
            )  # fmt: skip

    async def _launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        """Launch as one of SkyPilot's workers, which all have the same name."""
        assert task.nodes <= 2
        if task.nodes == 2:
            await self._buy(f"{name}-{USER}-worker", purchase)
        await super()._launch(name, purchase, task)

    async def _buy(self, name: str, purchase: Purchase) -> str:
        if purchase.cloud != "aws":
            return await super()._buy(name, purchase)
        with held():
            try:
                machine = await asyncio.to_thread(self._at_aws, name.removesuffix("-head"), purchase)
            except ClientError as e:
                raise error_for_exception("run_instances", e) from None
        if self.reply_lost:
            raise aiohttp.ServerDisconnectedError
        return machine

    async def _is_up(self, rented: Rented) -> bool:
        return rented.status == "running" if rented.cloud == "aws" else await super()._is_up(rented)

    def _at_aws(self, cluster: str, purchase: Purchase) -> str:
        wanted = [
            {"Name": f"tag:{TAG}", "Values": [cluster]},
            {"Name": "instance-state-name", "Values": ["pending", "running"]},
        ]
        standing = self._ec2.describe_instances(Filters=wanted)["Reservations"]
        if standing:
            return str(standing[0]["Instances"][0]["InstanceId"])
        tags = {TAG: cluster, "ray-cluster-name": cluster, "ray-node-type": "head", "Name": f"sky-{cluster}-head"}
        config: Any = purchase.config["aws"]
        disk = {
            "VolumeSize": purchase.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True,
            "Encrypted": config["disk_encrypted"],
        }  # fmt: skip
        call: dict[str, Any] = {
            "ImageId": self._image, "InstanceType": self.instead or purchase.instance_type,
            "MinCount": 1, "MaxCount": 1,
            "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
            "TagSpecifications": [
                {"ResourceType": "instance", "Tags": [{"Key": key, "Value": tags[key]} for key in tags]}
            ],
        }  # fmt: skip
        if purchase.zone:
            call["Placement"] = {"AvailabilityZone": purchase.zone}
        if purchase.use_spot:
            call["InstanceMarketOptions"] = {"MarketType": "spot"}
        return str(self._ec2.run_instances(**call)["Instances"][0]["InstanceId"])


class KnowingLauncher(PaperLauncher):
    """Launcher that can reach the machines that it launched, as long as they exist."""

    def __init__(self, host: Host, clouds: Clouds) -> None:
        super().__init__(host, Life(), nowhere())
        self._clouds = clouds

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        if any(machine.gone_at is None for machine in self._clouds.world.named(name)):
            return ["ssh", "-tt" if tty else "-T", name]
        return await super().ssh(name, tty=tty)


def nowhere() -> Point:
    return Point("nowhere", lambda: None)


class EmulatedCloud:
    """Emulated cloud, see `provider_laws.World`, in the simulated time of the loop."""

    adopts = False
    reachable = True

    def __init__(self, kind: Any, clouds: Clouds, aws: Aws | None, home: Path) -> None:
        self.kind, self.clouds, self.aws, self._home = kind, clouds, aws, home
        self.shows_ended = kind == "aws"
        self.agents = NoAgents(FarBlobs.in_memory(OURS))
        self.host = Host(lambda number: LaunchServer(number, clouds, self.agents, nowhere(), aws))
        self.opened: list[Provider] = []
        self._env = {f"{kind.upper()}_API_KEY": "test-key", "AWS_EC2_METADATA_DISABLED": "true"}
        self._log_in_to_aws(KEYS)

    def open(self, installation: Installation = OURS) -> Provider:
        cloud: Any = MortalCloud(self._cloud(installation), Life())
        account = Account(cloud, self._home / installation / "account.json")
        provider = CloudProvider(cloud, KnowingLauncher(self.host, self.clouds), account, installation=installation)
        self.opened.append(provider)
        return provider

    def _cloud(self, installation: Installation) -> Any:
        url = self.clouds.url
        given: dict[str, Any] = {"installation": installation, "clock": LoopClock(), "home": self._home}
        given["env"] = self._env
        match self.kind:
            case "runpod":
                return RunpodCloud(RunpodConfig(endpoint=url), **given)
            case "vast":
                return VastCloud(VastConfig(endpoint=url), **given, rate_clock=ReleasingClock())
            case "lambda":
                return LambdaCloud(LambdaConfig(endpoint=url), **given)
        assert self.aws is not None
        return AwsCloud(AwsConfig(endpoint=self.aws.url, regions=(EAST,)), **given)

    def _log_in_to_aws(self, keys: Mapping[str, str]) -> None:
        path = self._home / ".aws/credentials"
        path.parent.mkdir(exist_ok=True)
        path.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in keys.items()))

    def exchange_key(self, account: int) -> None:
        """Replace the key with a new key of `account`; the account 1 exists from the start."""
        key = f"key-{len(self.opened)}-of-{account}"
        self.clouds.world.api_key, self.clouds.world.account = key, account
        self._env[f"{self.kind.upper()}_API_KEY"] = key
        if self.aws is not None:
            self._log_in_to_aws({**KEYS, "aws_access_key_id": "AKIAANOTHER"} if account == 1 else self._of_another())

    def _of_another(self) -> Mapping[str, str]:
        """Return the keys of another account of moto, which has other machines."""
        assert self.aws is not None
        role = {"RoleArn": "arn:aws:iam::222222222222:role/x", "RoleSessionName": "test"}
        sts = boto3.client("sts", region_name=EAST, endpoint_url=self.aws.url, **KEYS)
        given = sts.assume_role(**role)["Credentials"]
        return {
            "aws_access_key_id": given["AccessKeyId"], "aws_secret_access_key": given["SecretAccessKey"],
            "aws_session_token": given["SessionToken"],
        }  # fmt: skip

    def boot_of(self, name: InstanceName) -> BootSpec:
        return BootSpec(env={"GPUBROKER_ATTEMPT": name[-13:]}, trainer=IMAGE)

    def made(self, name: InstanceName) -> int:
        return len(self.clouds.world.named(name))

    def running(self) -> set[str]:
        machines = [
            machine
            for machine in self.clouds.world.rented.values()
            if machine.machine is not None and machine.machine.alive
        ]
        return {machine.name[: len("gb-aaaa-") + 13] for machine in machines}

    def never_made(self, name: InstanceName) -> Handle:
        region = EAST if self.kind == "aws" else ""
        return Handle(provider=self.kind, id=NEVER[self.kind], name=name, region=region)

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # ---------------------------------------------------------------------------------------------------- its troubles

    def arm(self, trouble: Trouble, offer: Offer | None = None) -> None:
        match trouble:
            case "throttled" | "server_error":
                self._refuse(throttled=trouble == "throttled")
            case "no_capacity":
                assert offer is not None
                self._sell_out(offer)
            case "lost_reply":
                if self.aws is not None:
                    self._server.reply_lost = True
                for call in CREATING.get(self.kind, ()):  # aiohttp sends a PUT that was not answered once more
                    self.clouds.control.fail(cloud=self.kind, call=call, trouble="drop", done=True, times=2)
            case "wrong_machine":
                if self.aws is not None:
                    self._server.instead = ANOTHER["aws"]
                else:
                    self.clouds.control.sell_instead(self.kind, ANOTHER[self.kind])

    @property
    def _server(self) -> LaunchServer:
        server = self.host.server
        assert isinstance(server, LaunchServer)
        return server

    def _refuse(self, *, throttled: bool) -> None:
        if self.aws is not None:
            answer = (503, "RequestLimitExceeded") if throttled else (500, "InternalError")
            self.aws.front.failing[EAST, "*"] = answer
        else:
            self.clouds.control.fail(cloud=self.kind, status=429 if throttled else 500, times=EVER)

    def _sell_out(self, offer: Offer) -> None:
        if self.aws is not None:
            self.aws.front.failing[EAST, "RunInstances"] = (500, "InsufficientInstanceCapacity")
            return
        what = {"lambda": offer.instance_type, "vast": offer.purchase.get("ask", "")}.get(self.kind)
        if what is None:
            what = next(gpu for gpu, sky in SKY_NAMES.items() if sky == offer.purchase["gpu"])
        self.clouds.control.capacity(self.kind, what, 0)

    async def preempt(self, handle: Handle) -> None:
        """Preempt a machine without notice."""
        with held():
            await (self.aws.evict(handle.id) if self.aws else self.clouds.control.preempt(handle.id))

    async def close(self) -> None:
        for provider in self.opened:
            await provider.close()
        await self.host.close()
        await self.agents.close()


@asynccontextmanager
async def open_emulated_cloud(kind: str, home: Path) -> AsyncIterator[EmulatedCloud]:
    """Yield an account without machines at one cloud, and require that all calls were valid."""
    async with AsyncExitStack() as stack:
        clouds = await stack.enter_async_context(Clouds(now=LoopClock().now))
        aws = None
        if kind == "aws":
            ec2_backends[DEFAULT_ACCOUNT_ID][EAST].reset()  # moto is one for the whole process
            aws = Aws(clouds.world, regions=(EAST,))
            with held():
                await stack.enter_async_context(aws)
            aws.front.on_demand = {("g6e.xlarge", EAST): "1.861", ("p5.48xlarge", EAST): "55.04"}
            aws.front.spot = {("g6e.xlarge", f"{EAST}a"): "0.60", ("g6e.xlarge", f"{EAST}b"): "0.53"}
            aws.front.quotas = dict(QUOTAS)
        world = EmulatedCloud(kind, clouds, aws, home)
        stack.push_async_callback(world.close)
        yield world
        assert clouds.violations == []
