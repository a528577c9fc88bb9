"""AWS: moto's EC2, STS, IAM and S3 behind a proxy that adds prices, with a real machine for each instance.

An instance that moto lists as running has a machine and is billed; a terminated one has no machine. After every call
that changes instances, machines are booted or killed accordingly before the next call is answered. They belong to the
same account as those of the other clouds, so that one bill covers all.
"""

import asyncio
import base64
import csv
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs

import boto3
import yaml
from aiohttp import web
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from tests.clouds.bill import MONTH_H
from tests.clouds.imds import INSTANCE_ACTION
from tests.clouds.machine import MachineSpec
from tests.clouds.machines import NamespaceMachine
from tests.clouds.state import Rented, World
from tests.unit.providers.aws_front import Front, moto_server

CHANGES = {
    "RunInstances",
    "TerminateInstances",
    "StopInstances",
    "StartInstances",
    "CreateFleet",
    "RequestSpotInstances",
}
MAX_BODY = 2**26
SSH_PORT = 22
TAG = "skypilot-cluster-name"
GPU_TAGS = ("skypilot:custom-cpu-ubuntu", "skypilot:custom-gpu-ubuntu", "skypilot:custom-gpu-ubuntu-cuda13")
"""SkyPilot's names of its default images (sky/clouds/aws.py)."""
EVICTED = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Spot instance termination")
SHUT_DOWN = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")
"""Codes and messages as the EC2 API reference lists them under StateReason."""
PROXY = Path(__file__).with_name("aws_proxy.py")


class Ec2Front(Front):
    """Proxy that calls `changed` with the region of every call that may have changed instances.

    `lock` serialises the calls, because moto would otherwise show another call's half-created instances, such as a spot
    instance as on-demand until it has its disks.
    """

    def __init__(self, moto: str, lock: asyncio.Lock, changed: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(moto=moto)
        self._lock, self._changed = lock, changed

    async def _forward(self, request: web.Request, body: bytes, region: str) -> web.Response:
        action = parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
        async with self._lock:
            answer = await super()._forward(request, body, region)
            if action in CHANGES:
                await self._changed(region)
        return answer


class Aws:
    """Emulated AWS: `async with Aws(world) as aws:` serves it at `aws.url` until the end of the block."""

    def __init__(self, world: World, *, regions: Sequence[str] = ("us-east-1",)) -> None:
        self.world, self.regions = world, tuple(regions)
        self.front: Ec2Front
        self.url = ""
        self.images: dict[str, str] = {}
        """AMI of the machines, by region."""
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._clients: dict[str, Any] = {}
        self._imds: dict[str, dict[str, str]] = {}
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        self.front = Ec2Front(self._stack.enter_context(moto_server()), self._lock, self._compare)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/_machines/{address}", self._where)
        app.router.add_route("*", "/{path:.*}", self.front.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for region in self.regions:
            await asyncio.to_thread(self._furnish, region)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def environment(self) -> Mapping[str, str]:
        """Return variables that send AWS clients here; S3 calls go to moto itself, as the proxy reads whole bodies."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ENDPOINT_URL_S3": self.front.moto,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def sky_config(self) -> Mapping[str, Any]:
        """Return the SkyPilot configuration that routes SSH to the machines."""
        return {"aws": {"ssh_proxy_command": f"{sys.executable} {PROXY} {self.url} %h"}}

    def write_catalog(self, folder: Path) -> None:
        """Write the files of SkyPilot's catalog that purchases lack. `folder`: `.sky/catalogs/v8/aws` of its home."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "images.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("Tag", "Region", "OS", "OSVersion", "ImageId", "CreationDate", "BaseImageId"))
            for region, image in self.images.items():
                rows.writerows((tag, region, "ubuntu", "22.04", image, "20260101", image) for tag in GPU_TAGS)
        quotas = folder / "instance_quota_mapping.csv"
        quotas.write_text("InstanceType,OnDemandInstanceCode,SpotInstanceCode\n")

    # ---------------------------------------------------------------------------------------------------- the machines

    def client(self, region: str, service: str = "ec2") -> Any:
        """Return a client of moto itself, with which a test changes the account without the proxy."""
        key = f"{service} {region}"
        if key not in self._clients:
            self._clients[key] = boto3.client(
                service, region_name=region, endpoint_url=self.front.moto,
                aws_access_key_id="emulator", aws_secret_access_key="emulator",
            )  # fmt: skip
        return self._clients[key]

    def _furnish(self, region: str) -> None:
        """Create the resources that every account has: an internet gateway of the default VPC, and an image."""
        ec2 = self.client(region)
        if left := [one["InstanceId"] for one in self._described(region)]:  # moto is one for the whole process
            ec2.terminate_instances(InstanceIds=left)
        vpc = ec2.describe_vpcs(Filters=[{"Name": "isDefault", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
        mine = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
        if not ec2.describe_internet_gateways(Filters=mine)["InternetGateways"]:
            gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
            ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
            table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"][0]
            ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 45, "VolumeType": "gp3"}}
        self.images[region] = ec2.register_image(
            Name=f"ubuntu with docker {len(self.images)}", RootDeviceName="/dev/sda1", BlockDeviceMappings=[disk],
            Architecture="x86_64", VirtualizationType="hvm",
        )["ImageId"]  # fmt: skip

    async def _compare(self, region: str) -> None:
        """Boot and end machines until they are those that moto lists. Requires the lock."""
        for one in await asyncio.to_thread(self._described, region):
            await self._follow(region, one)
            if rented := self.world.rented.get(one["InstanceId"]):  # a start brings another public address
                rented.facts["addresses"] = (one.get("PublicIpAddress"), one.get("PrivateIpAddress"))

    def _described(self, region: str) -> Sequence[Mapping[str, Any]]:
        pages = self.client(region).get_paginator("describe_instances").paginate()
        return [one for page in pages for reservation in page["Reservations"] for one in reservation["Instances"]]

    async def _follow(self, region: str, one: Mapping[str, Any]) -> None:
        state, rented = one["State"]["Name"], self.world.rented.get(one["InstanceId"])
        if rented is None:
            if state in ("pending", "running"):
                await self._rent(region, one)
        elif state in ("shutting-down", "terminated"):
            await self.world.destroy(rented, "terminated")
        elif state in ("stopping", "stopped"):
            if rented.status != "stopped":
                await self.world.stop(rented, "stopped", "stopped")
        elif rented.status == "stopped":
            await self.world.resume(rented, starting="pending", running="running", billed_from=_billed_from(one))
            self.world.spawn(self._heed_shutdown(region, rented))

    async def _rent(self, region: str, one: Mapping[str, Any]) -> None:
        self.world.sale("aws")
        data = await asyncio.to_thread(self._user_data, region, one["InstanceId"])
        (ip, _), kind, zone = self.world.address(), one["InstanceType"], one["Placement"]["AvailabilityZone"]
        spot = one.get("InstanceLifecycle") == "spot"
        price = self.front.spot.get((kind, zone)) if spot else self.front.on_demand.get((kind, region))
        imds = self._imds[one["InstanceId"]] = _imds(one, region)
        spec = MachineSpec(
            id=one["InstanceId"], user="ubuntu", public_keys=_keys(data), ip=ip, ssh_port=SSH_PORT, imds=imds,
            host_key=_host_key(data),
            private_ip=one["PrivateIpAddress"],
        )  # fmt: skip
        rented = Rented(
            id=one["InstanceId"], cloud="aws", name=_tags(one).get(TAG) or _tags(one).get("Name", ""), gpu=kind, gpus=1,
            spot=spot, usd_per_hour=Decimal(price or 0), status="pending", created_at=self.world.now(), spec=spec,
            storage_usd_per_hour=await asyncio.to_thread(self._storage, region, one),
            facts={"region": region, "addresses": ()}, request={"user_data": data, **one},
        )  # fmt: skip
        await self.world.rent(rented, billed_from=_billed_from(one), running="running")
        self.world.spawn(self._heed_shutdown(region, rented))

    def _user_data(self, region: str, machine: str) -> str:
        told = self.client(region).describe_instance_attribute(InstanceId=machine, Attribute="userData")
        return base64.b64decode(told["UserData"].get("Value", "")).decode()

    def _storage(self, region: str, one: Mapping[str, Any]) -> Decimal:
        volumes = [disk["Ebs"]["VolumeId"] for disk in one.get("BlockDeviceMappings", [])]
        found = self.client(region).describe_volumes(VolumeIds=volumes)["Volumes"] if volumes else []
        gib = sum(int(volume["Size"]) for volume in found)
        return Decimal(self.front.disk.get(region, "0")) * gib / MONTH_H

    async def _where(self, request: web.Request) -> web.Response:
        """Answer aws_proxy.py with the real address and port of the machine behind an address of moto's."""
        address = request.match_info["address"]
        for rented in self.world.rented.values():
            if rented.cloud == "aws" and rented.gone_at is None and address in rented.facts["addresses"]:
                return web.Response(text=f"{rented.spec.ip} {rented.spec.ssh_port}")
        return web.Response(status=404, text=f"no machine has the address {address}")

    # ------------------------------------------------------------------------------------------------------ their ends

    async def preempt(self, machine: str, *, notice_s: float = 120.0) -> None:
        """Interrupt a spot machine: give the notice at once, end the machine after `notice_s`."""
        rented = self.world.rented[machine]
        time = self.world.now() + timedelta(seconds=notice_s)
        self._imds[machine][INSTANCE_ACTION] = f'{{"action": "terminate", "time": "{time:%Y-%m-%dT%H:%M:%SZ}"}}'
        self._imds[machine]["/latest/meta-data/spot/termination-time"] = f"{time:%Y-%m-%dT%H:%M:%SZ}"

        async def later() -> None:
            await asyncio.sleep(notice_s)
            await self.evict(machine)

        if rented.gone_at is None:
            self.world.spawn(later())

    async def evict(self, machine: str) -> None:
        """Preempt the machine at once."""
        rented = self.world.rented[machine]
        async with self._lock:
            if rented.gone_at is None:
                await asyncio.to_thread(self._end, rented.facts["region"], machine, EVICTED)
                await self.world.destroy(rented, "terminated", kind="evicted")

    def _end(self, region: str, machine: str, reason: tuple[str, str]) -> None:
        self.client(region).terminate_instances(InstanceIds=[machine])
        instance = ec2_backends[DEFAULT_ACCOUNT_ID][region].get_instance(machine)
        instance.state_reason = StateReason(message=reason[1], code=reason[0])

    async def _heed_shutdown(self, region: str, rented: Rented) -> None:
        """Terminate or stop a machine that shut itself down, as its launch requested."""
        await self.world.reach(rented.id, "running", within_s=600)
        if isinstance(rented.machine, NamespaceMachine):

            def died(halted: bool) -> None:
                if halted:
                    self._loop.call_soon_threadsafe(self.world.spawn, self._shut_down(region, rented))

            rented.machine.died = died

    async def _shut_down(self, region: str, rented: Rented) -> None:
        def told() -> str:
            wanted = {"InstanceId": rented.id, "Attribute": "instanceInitiatedShutdownBehavior"}
            found = self.client(region).describe_instance_attribute(**wanted)
            return str(found["InstanceInitiatedShutdownBehavior"].get("Value", "stop"))

        async with self._lock:
            if rented.gone_at is not None:
                return
            if await asyncio.to_thread(told) == "terminate":
                await asyncio.to_thread(self._end, region, rented.id, SHUT_DOWN)
            else:
                await asyncio.to_thread(self.client(region).stop_instances, InstanceIds=[rented.id])
            await self._compare(region)


def _billed_from(one: Mapping[str, Any]) -> Literal["created", "running"]:
    """Return the start of billing: EC2 bills from `running`, which moto reports long before the machine has booted."""
    return "created" if one["State"]["Name"] == "running" else "running"


def _tags(one: Mapping[str, Any]) -> Mapping[str, str]:
    return {tag["Key"]: tag["Value"] for tag in one.get("Tags", [])}


def _keys(user_data: str) -> tuple[str, ...]:
    """Return the public keys that cloud-init would install."""
    config = yaml.safe_load(user_data) if user_data.startswith("#cloud-config") else {}
    found = [key for user in config.get("users", []) for key in user.get("ssh_authorized_keys", [])]
    return tuple(key.strip() for key in found)


def _host_key(user_data: str) -> str:
    """Return the private host key that cloud-init would install; empty: none."""
    config = yaml.safe_load(user_data) if user_data.startswith("#cloud-config") else {}
    return str(config.get("ssh_keys", {}).get("ed25519_private", ""))


def _imds(one: Mapping[str, Any], region: str) -> dict[str, str]:
    base = "/latest/meta-data"
    return {
        f"{base}/instance-id": one["InstanceId"],
        f"{base}/instance-type": one["InstanceType"],
        f"{base}/instance-life-cycle": one.get("InstanceLifecycle", "on-demand"),
        f"{base}/placement/availability-zone": one["Placement"]["AvailabilityZone"],
        f"{base}/placement/region": region,
        f"{base}/local-ipv4": one.get("PrivateIpAddress", ""),
        f"{base}/public-ipv4": one.get("PublicIpAddress", ""),
    }
