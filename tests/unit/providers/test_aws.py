"""AWS's native half against moto, with the prices, quotas and scores of `aws_front`."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import pytest

from broker.decide.liveness import mismatch
from broker.domain.errors import Gone, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.instance import BootSpec, CloudOptions, InstanceState
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from providers.aws import TAG, AwsCloud, AwsConfig
from providers.aws_market import quota_of
from providers.aws_offers import DISK_GIB, NO_PRICE
from providers.cloud import Purchase
from providers.sieve import Sieve
from tests.unit.providers.aws_front import IMAGE, Front, front, moto_server
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
        """As SkyPilot does; returns the instance's id."""
        ec2 = self.ec2(region)
        tags = [{"Key": "Name", "Value": "whatever"}] + ([] if label is None else [{"Key": TAG, "Value": label}])
        disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 64, **more.pop("ebs", {"Encrypted": True})}}]
        found = ec2.run_instances(
            ImageId=IMAGE, MinCount=1, MaxCount=1, BlockDeviceMappings=disk,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}], **{"InstanceType": "g6e.xlarge", **more},
        )  # fmt: skip
        return str(found["Instances"][0]["InstanceId"])


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
async def world(moto: str, tmp_path: Path) -> AsyncIterator[World]:
    async with front(moto) as (made, url):
        made.on_demand = {("g6e.xlarge", EAST): "1.861", ("p5.48xlarge", EAST): "55.04", ("g6e.xlarge", WEST): "1.861"}
        made.spot = {
            ("g6e.xlarge", f"{EAST}a"): "0.60", ("g6e.xlarge", f"{EAST}b"): "0.53", ("g6e.xlarge", f"{WEST}a"): "0.93",
        }  # fmt: skip
        made.quotas = dict(QUOTAS)
        opened = World(front=made, endpoint=url, home=tmp_path)
        yield opened
        for cloud in opened.opened:
            await cloud.close()


def handle(machine: str, region: str = EAST) -> Handle:
    return Handle(provider="aws", id=machine, name=NAME, region=region)


async def offers(cloud: AwsCloud) -> tuple[dict[str, Offer], dict[str, int]]:
    sieve = Sieve(GpuAsk())
    await cloud.rows(sieve)
    return {offer.id: offer for offer in sieve.offers}, dict(sieve.dropped)


# ------------------------------------------------------------------------------------------------------------- offers


async def test_a_machine_is_sold_on_demand_and_by_the_spot_price_of_each_zone(world: World) -> None:
    world.front.scores = {"use1-az6": 3, "use1-az1": 1}
    found, _ = await offers(world.open())
    assert sorted(found) == [
        "aws/aws/us-east-1/g6e.xlarge/on-demand",
        "aws/aws/us-east-1/g6e.xlarge/spot/us-east-1a",
        "aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b",
        "aws/aws/us-east-1/p5.48xlarge/on-demand",
    ]
    spot = found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1a"]
    assert (spot.accelerator, spot.gpus, spot.vcpus, spot.ram_bytes) == ("l40s", 1, 4, 32 * 1024**3)
    assert (spot.gpu_memory_bytes, spot.spot) == (45776 * 1024**2, True)
    assert (spot.usd_per_hour, spot.on_demand_usd_per_hour) == (Decimal("0.60"), Decimal("1.861"))
    assert spot.available is True
    assert found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b"].available is None
    big = found["aws/aws/us-east-1/p5.48xlarge/on-demand"]
    assert (big.accelerator, big.gpus, big.gpu_memory_bytes) == ("h100-sxm", 8, 80 * 1024**3)
    assert big.facts is not None
    assert (big.facts.interconnect, big.facts.down_mbit_s) == ("nvlink", 3_200_000.0)


async def test_the_disk_is_part_of_the_price(world: World) -> None:
    world.front.disk = {EAST: "0.073"}
    found, _ = await offers(world.open())
    disk = Decimal("0.073") * DISK_GIB / 730
    assert found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b"].usd_per_hour == Decimal("0.53") + disk
    assert found["aws/aws/us-east-1/g6e.xlarge/on-demand"].usd_per_hour == Decimal("1.861") + disk


async def test_machines_that_cannot_run_the_image_are_counted(world: World) -> None:
    _, dropped = await offers(world.open())
    assert dropped["ARM processor: the image is for x86-64"] == 6
    assert dropped["share of a GPU"] > 0
    assert dropped["GPU that is not in the hardware table"] > 0


async def test_a_machine_that_lacks_a_field_is_counted_and_the_others_are_sold(world: World) -> None:
    world.front.rewritten = {"<defaultVCpus>192</defaultVCpus>": ""}
    found, dropped = await offers(world.open())
    assert {offer.instance_type for offer in found.values()} == {"g6e.xlarge"}
    assert dropped["unreadable"] > 0


async def test_an_answer_that_cannot_be_read_is_no_answer(world: World) -> None:
    world.front.spot[("g6e.xlarge", f"{EAST}a")] = "cheap"
    with pytest.raises(OutcomeUnknown, match="AWS: an answer about us-east-1 cannot be read"):
        await offers(world.open())


async def test_a_quota_of_0_takes_its_machines_away_with_the_reason(world: World) -> None:
    world.front.quotas |= {"All G and VT Spot Instance Requests": 0.0, "Running On-Demand P instances": 96.0}
    found, dropped = await offers(world.open())
    assert set(found) == {"aws/aws/us-east-1/g6e.xlarge/on-demand"}
    assert dropped["quota of 0 for All G and VT Spot Instance Requests"] == 2
    assert dropped["quota of 96 vCPUs for Running On-Demand P instances"] == 1


@pytest.mark.parametrize(
    ("machine", "spot", "quota"),
    [
        ("p4de.24xlarge", True, ("All P4, P3 and P2 Spot Instance Requests", 0.0)),
        ("p5en.48xlarge", True, ("All P5 Spot Instance Requests", 16.0)),
        ("p6-b200.48xlarge", True, None),
        ("p6-b200.48xlarge", False, ("Running On-Demand P instances", 192.0)),
        ("gr6.4xlarge", True, ("All G and VT Spot Instance Requests", 64.0)),
        ("g6e.xlarge", False, ("Running On-Demand G and VT instances", 64.0)),
    ],
)
def test_each_family_has_its_quota(machine: str, spot: bool, quota: tuple[str, float] | None) -> None:
    assert quota_of(machine, spot, QUOTAS) == quota


@pytest.mark.parametrize("action", ["ListServiceQuotas", "GetSpotPlacementScores"])
async def test_what_only_helps_may_be_missing(world: World, action: str) -> None:
    world.front.failing = {("*", action): (400, "AccessDeniedException")}
    found, _ = await offers(world.open())
    assert len(found) == 4


async def test_without_the_pricing_api_spot_is_sold_and_the_rest_is_counted(world: World) -> None:
    world.front.failing = {("*", "GetProducts"): (400, "AccessDeniedException")}
    cloud = world.open()
    found, dropped = await offers(cloud)
    assert {offer.spot for offer in found.values()} == {True}
    assert all(offer.on_demand_usd_per_hour is None for offer in found.values())
    assert dropped[NO_PRICE] > 10


async def test_public_prices_are_asked_for_once_in_hours_and_spot_prices_at_each_poll(world: World) -> None:
    cloud = world.open()
    await offers(cloud)
    first = len(world.front.asked)
    world.front.spot[("g6e.xlarge", f"{EAST}a")] = "0.75"
    world.clock.advance(30)
    found, _ = await offers(cloud)
    assert found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1a"].usd_per_hour == Decimal("0.75")
    assert world.front.asked[first:] == [(EAST, "DescribeSpotPriceHistory")]


async def test_one_region_down_does_not_hide_the_others(world: World) -> None:
    world.front.failing = {(WEST, "*"): (503, "Unavailable")}
    found, dropped = await offers(world.open(regions=(EAST, WEST)))
    assert {offer.region for offer in found.values()} == {EAST}
    assert dropped["us-west-2 does not answer"] == 1
    with pytest.raises(OutcomeUnknown, match="Unavailable"):
        await offers(world.open(regions=(WEST,)))


# ---------------------------------------------------------------------------------------------------------- inventory


async def test_machines_are_listed_by_our_tag_in_all_regions_with_what_was_bought(world: World) -> None:
    cloud = world.open(regions=(EAST, WEST))
    await offers(cloud)
    spot = world.launch(Placement={"AvailabilityZone": f"{EAST}b"}, InstanceMarketOptions={"MarketType": "spot"})
    other = world.launch(WEST, InstanceType="p4d.24xlarge")
    for label in (None, "gb-aaab-" + "b" * 13 + "-1a2b3c4d", f"{NAME}c-1a2b3c4d", "x" + NAME):
        world.launch(label=label)
    seen = {one.handle.id: one for one in await cloud.list()}
    assert set(seen) == {spot, other}
    first, second = seen[spot], seen[other]
    assert first.handle == handle(spot)
    assert (first.accelerator, first.gpus, first.spot) == ("l40s", 1, True)
    assert (second.handle.region, second.accelerator, second.gpus, second.spot) == (WEST, "a100-40gb", 8, False)
    assert second.usd_per_hour is None


async def test_a_spot_machine_is_listed_with_the_price_of_now(world: World) -> None:
    """It is what AWS bills; a market that rises after the purchase is no other machine than the one that was bought."""
    cloud = world.open()
    found, _ = await offers(cloud)
    bought = found["aws/aws/us-east-1/g6e.xlarge/spot/us-east-1b"]
    zone: dict[str, Any] = {"Placement": {"AvailabilityZone": f"{EAST}b"}}
    spot, plain = world.launch(**zone, InstanceMarketOptions={"MarketType": "spot"}), world.launch(**zone)
    world.front.spot[("g6e.xlarge", f"{EAST}b")] = "0.99"
    world.clock.advance(30)
    await offers(cloud)
    ours = {spot: Decimal("0.99"), plain: Decimal("1.861")}
    seen = {one.handle.id: one for one in await cloud.list() if one.handle.id in ours}
    assert {machine: one.usd_per_hour for machine, one in seen.items()} == ours
    assert (seen[spot].price_moves, seen[plain].price_moves, bought.price_moves) == (True, False, True)
    assert mismatch(bought, (seen[spot],)) is None


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("pending", InstanceState.STARTING), ("running", InstanceState.RUNNING), ("stopping", InstanceState.STOPPED),
        ("stopped", InstanceState.STOPPED), ("shutting-down", InstanceState.STOPPED),
        ("terminated", InstanceState.GONE), ("hibernating", InstanceState.UNKNOWN),
    ],
)  # fmt: skip
async def test_states_are_mapped_whole(world: World, name: str, state: InstanceState) -> None:
    world.launch()
    world.front.rewritten = {"<name>running</name>": f"<name>{name}</name>"}
    assert [one.state for one in await world.open().list()] == [state]


async def test_what_was_destroyed_is_gone(world: World) -> None:
    cloud, machine = world.open(), world.launch()
    await cloud.destroy(handle(machine))
    assert [one.state for one in await cloud.list()] == [InstanceState.GONE]
    with pytest.raises(Gone):
        await cloud.destroy(handle(machine))
    with pytest.raises(Gone):
        await cloud.destroy(handle("i-0123456789abcdef0"))
    with pytest.raises(Rejected, match="region"):
        await cloud.destroy(handle(machine, region=""))


async def test_a_listing_without_one_region_is_none(world: World) -> None:
    world.launch()
    world.front.failing = {(WEST, "DescribeInstances"): (503, "RequestLimitExceeded")}
    with pytest.raises(Throttled):
        await world.open(regions=(EAST, WEST)).list()


# -------------------------------------------------------------------------------------------------------- credentials


async def test_check_is_read_only_and_says_what_is_missing(world: World) -> None:
    assert await world.open().check() is None
    assert world.front.asked == [(EAST, "GetCallerIdentity"), (EAST, "DescribeInstances")]
    with pytest.raises(Rejected, match="aws configure"):
        await world.open(AWS_REGION=EAST).check()
    world.front.failing = {("*", "DescribeInstances"): (403, "UnauthorizedOperation")}
    with pytest.raises(Rejected, match=r"deploy/iam/aws.json"):
        await world.open().check()
    world.front.failing = {("*", "GetCallerIdentity"): (400, "ExpiredToken")}
    with pytest.raises(Rejected, match="aws sso login"):
        await world.open().check()


async def test_keys_of_the_home_are_taken_up_when_they_change(world: World) -> None:
    cloud = world.open(AWS_REGION=EAST)
    with pytest.raises(Rejected):
        await cloud.check()
    (world.home / ".aws").mkdir()
    (world.home / ".aws/credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert await cloud.check() is None


async def test_an_unknown_region_is_named(world: World) -> None:
    config = AwsConfig(regions=("us-east-9",))
    env = {**KEYS, "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": world.endpoint}
    cloud = AwsCloud(config, installation=OURS, clock=world.clock, env=env, home=world.home)
    world.opened.append(cloud)
    assert await cloud.check() == "AWS: there is no region us-east-9; correct providers.aws.regions"


# ----------------------------------------------------------------------------------------------------------- purchase


async def bought(world: World, which: str, boot: BootSpec) -> Purchase:
    cloud = world.open()
    found, _ = await offers(cloud)
    return cloud.purchase(found[f"aws/aws/us-east-1/g6e.xlarge/{which}"], boot)


async def test_a_spot_purchase_pins_the_zone_and_its_price(world: World) -> None:
    purchase = await bought(world, "spot/us-east-1b", BootSpec())
    assert (purchase.region, purchase.zone, purchase.use_spot) == (EAST, f"{EAST}b", True)
    assert purchase.disk_gb == DISK_GIB
    (row,) = purchase.catalog["aws/vms.csv"]
    assert (row["InstanceType"], row["Region"], row["AvailabilityZone"]) == ("g6e.xlarge", EAST, "use1-az1")
    assert (Decimal(row["Price"]), Decimal(row["SpotPrice"])) == (Decimal("1.861"), Decimal("0.53"))
    assert (row["AcceleratorName"], row["AcceleratorCount"], row["Arch"]) == ("L40S", "1.0", "x86_64")
    assert purchase.config == {"aws": {"disk_encrypted": True, "remote_identity": "NO_UPLOAD"}}
    assert (purchase.pin, purchase.network_tier) == ({}, None)


async def test_an_on_demand_purchase_may_be_met_in_any_zone(world: World) -> None:
    purchase = await bought(world, "on-demand", BootSpec())
    assert (purchase.zone, purchase.use_spot) == (None, False)
    rows = {row["AvailabilityZone"]: row["SpotPrice"] for row in purchase.catalog["aws/vms.csv"]}
    assert set(rows) == {"use1-az1", "use1-az2", "use1-az4", "use1-az6"}
    assert (Decimal(rows["use1-az6"]), rows["use1-az2"]) == (Decimal("0.60"), "")


async def test_what_the_job_asks_for_reaches_skypilot_and_its_plugin(world: World) -> None:
    options = CloudOptions(vpc="lab", subnets=("a", "b"), encrypted_volume=True, kms_key="alias/lab")
    purchase = await bought(world, "on-demand", BootSpec(nodes=2, options=options))
    assert purchase.config["aws"] == {
        "disk_encrypted": True, "remote_identity": "NO_UPLOAD", "vpc_name": "lab", "subnet_names": ["a", "b"],
    }  # fmt: skip
    assert purchase.pin == {"kms_key": "alias/lab", "placement_group": "gb-aaaa-"}
    assert purchase.network_tier == "best"


# ------------------------------------------------------------------------------------------------------------ confirm


def plain(**pin: str) -> Purchase:
    config = {"aws": {"disk_encrypted": True}}
    return Purchase(cloud="aws", region=EAST, instance_type="g6e.xlarge", use_spot=False, config=config, pin=pin)


async def test_a_machine_that_would_stop_is_told_to_terminate_and_its_disk_to_go(world: World) -> None:
    machine, ec2 = world.launch(), world.ec2()
    await world.open().confirm(handle(machine), plain())
    told = ec2.describe_instance_attribute(InstanceId=machine, Attribute="instanceInitiatedShutdownBehavior")
    assert told["InstanceInitiatedShutdownBehavior"] == {"Value": "terminate"}
    (found,) = ec2.describe_instances(InstanceIds=[machine])["Reservations"][0]["Instances"]
    assert [one["Ebs"]["DeleteOnTermination"] for one in found["BlockDeviceMappings"]] == [True]


async def test_a_machine_that_stays_stoppable_is_refused(world: World) -> None:
    world.front.failing = {("*", "ModifyInstanceAttribute"): (400, "UnsupportedOperation")}
    machine = world.launch(ebs={"Encrypted": True, "DeleteOnTermination": True})
    with pytest.raises(Rejected, match="UnsupportedOperation"):
        await world.open().confirm(handle(machine), plain())


async def test_a_plain_volume_is_refused_when_it_should_be_encrypted(world: World) -> None:
    machine = world.launch(ebs={"Encrypted": False})
    with pytest.raises(Rejected, match="not encrypted"):
        await world.open().confirm(handle(machine), plain())
    config = {"aws": {"disk_encrypted": False}}
    free = Purchase(cloud="aws", region=EAST, instance_type="g6e.xlarge", use_spot=False, config=config)
    await world.open().confirm(handle(machine), free)


async def test_the_volumes_key_is_the_one_that_was_asked_for(world: World) -> None:
    kms = boto3.client(
        "kms", region_name=EAST, endpoint_url=world.front.moto, aws_access_key_id="x", aws_secret_access_key="y"
    )
    ours, other = (kms.create_key()["KeyMetadata"] for _ in range(2))
    kms.create_alias(AliasName="alias/lab", TargetKeyId=ours["KeyId"])
    machine = world.launch(ebs={"Encrypted": True, "KmsKeyId": ours["Arn"]})
    await world.open().confirm(handle(machine), plain(kms_key="alias/lab"))
    with pytest.raises(Rejected, match="not encrypted with"):
        await world.open().confirm(handle(machine), plain(kms_key=other["KeyId"]))


async def test_a_machine_with_a_role_is_refused(world: World) -> None:
    iam = boto3.client(
        "iam", region_name=EAST, endpoint_url=world.front.moto, aws_access_key_id="x", aws_secret_access_key="y"
    )
    iam.create_instance_profile(InstanceProfileName="skypilot-v1")
    machine = world.launch(IamInstanceProfile={"Name": "skypilot-v1"})
    with pytest.raises(Rejected, match="skypilot-v1"):
        await world.open().confirm(handle(machine), plain())


async def test_a_machine_elsewhere_than_asked_is_refused(world: World) -> None:
    ec2, machine, cloud = world.ec2(), world.launch(), world.open()
    (found,) = ec2.describe_instances(InstanceIds=[machine])["Reservations"][0]["Instances"]
    base = {"cloud": "aws", "region": EAST, "instance_type": "g6e.xlarge", "use_spot": False}
    vpc = Purchase(**base, config={"aws": {"vpc_name": "lab"}})  # type: ignore[arg-type]
    subnet = Purchase(**base, config={"aws": {"subnet_names": ["left", "right"]}})  # type: ignore[arg-type]
    for purchase, why in ((vpc, "VPC lab"), (subnet, "subnets"), (plain(placement_group="gb-aaaa-"), "placement")):
        with pytest.raises(Rejected, match=why):
            await cloud.confirm(handle(machine), purchase)
    ec2.create_tags(Resources=[found["VpcId"]], Tags=[{"Key": "Name", "Value": "lab"}])
    ec2.create_tags(Resources=[found["SubnetId"]], Tags=[{"Key": "Name", "Value": "right"}])
    for purchase in (vpc, subnet):
        await cloud.confirm(handle(machine), purchase)
