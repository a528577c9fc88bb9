"""AWS as moto and `aws_front` show it, and our half of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from providers.aws.provider import TAG, AwsCloud, AwsConfig
from providers.common.market_rules import OfferFilter
from tests.unit.providers.aws_front import IMAGE, Front
from tests.unit.providers.clocks import SteppedClock

OURS = Installation("aaaa")
NAME = instance_name(OURS, AttemptId("b" * 13))
EAST, WEST = "us-east-1", "us-west-2"
QUOTAS = {
    "Running On-Demand P instances": 192.0,
    "Running On-Demand G and VT instances": 64.0,
    "All G and VT Spot Instance Requests": 64.0,
    "All P4, P3 and P2 Spot Instance Requests": 0.0,
    "All P5 Spot Instance Requests": 16.0,
}
KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}


@dataclass
class World:
    front: Front
    endpoint: str
    home: Path
    clock: SteppedClock = field(default_factory=SteppedClock)
    opened: list[AwsCloud] = field(default_factory=list)

    def open(self, *, regions: tuple[str, ...] = (EAST,), **env: str) -> AwsCloud:
        config = AwsConfig(endpoint=self.endpoint, regions=regions)
        wanted = {"AWS_EC2_METADATA_DISABLED": "true", **(env or KEYS)}
        cloud = AwsCloud(config, installation=OURS, clock=self.clock, env=wanted, home=self.home)
        self.opened.append(cloud)
        return cloud

    def ec2(self, region: str = EAST) -> Any:
        return boto3.client(
            "ec2", region_name=region, endpoint_url=self.front.moto,
            aws_access_key_id="x", aws_secret_access_key="y",
        )  # fmt: skip

    def launch(self, region: str = EAST, *, label: str | None = f"{NAME}-1a2b3c4d", **more: Any) -> str:
        """Launch an instance as SkyPilot does, and return its ID."""
        ec2 = self.ec2(region)
        tags = [{"Key": "Name", "Value": "whatever"}] + ([] if label is None else [{"Key": TAG, "Value": label}])
        disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 64, **more.pop("ebs", {"Encrypted": True})}}]
        found = ec2.run_instances(
            ImageId=IMAGE, MinCount=1, MaxCount=1, BlockDeviceMappings=disk,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}], **{"InstanceType": "g6e.xlarge", **more},
        )  # fmt: skip
        return str(found["Instances"][0]["InstanceId"])


def handle(machine: str, region: str = EAST) -> Handle:
    return Handle(provider="aws", id=machine, name=NAME, region=region)


async def offers(cloud: AwsCloud) -> tuple[dict[str, Offer], dict[str, int]]:
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    return {offer.id: offer for offer in offer_filter.offers}, dict(offer_filter.dropped)
