"""Purchases at AWS, and the checks of the bought machines, against moto."""

from decimal import Decimal

import boto3
import pytest

from broker.domain.errors import Rejected
from broker.domain.instance import BootSpec, CloudOptions
from providers.aws.offers import DISK_GIB
from providers.common.cloud import Purchase
from tests.unit.providers.aws.world import EAST, World, handle, offers

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


async def test_a_larger_volume_is_bought_in_whole_gib_at_its_price(world: World) -> None:
    world.front.disk = {EAST: "0.073"}
    cloud = world.open()
    found, _ = await offers(cloud)
    plain_offer = found["aws/aws/us-east-1/g6e.xlarge/on-demand"]
    larger = plain_offer.with_disk(500 * 10**9)
    assert cloud.purchase(larger, BootSpec()).disk_gb == 466
    more = Decimal("0.073") / 730 * (466 - DISK_GIB)
    assert abs(larger.usd_per_hour - plain_offer.usd_per_hour - more) < Decimal("0.000002")


async def test_a_volume_without_a_known_price_has_the_usual_size(world: World) -> None:
    found, _ = await offers(world.open())
    assert found["aws/aws/us-east-1/g6e.xlarge/on-demand"].larger_disk is None


async def test_an_on_demand_purchase_may_be_met_in_any_zone(world: World) -> None:
    purchase = await bought(world, "on-demand", BootSpec())
    assert (purchase.zone, purchase.use_spot) == (None, False)
    rows = {row["AvailabilityZone"]: row["SpotPrice"] for row in purchase.catalog["aws/vms.csv"]}
    assert set(rows) == {"use1-az1", "use1-az2", "use1-az4", "use1-az6"}
    assert (Decimal(rows["use1-az6"]), rows["use1-az2"]) == (Decimal("0.60"), "")


async def test_the_jobs_cloud_options_reach_skypilot_and_its_plugin(world: World) -> None:
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


async def test_a_stoppable_machine_is_set_to_terminate_and_delete_its_disk(world: World) -> None:
    machine, ec2 = world.launch(), world.ec2()
    await world.open().confirm(handle(machine), plain())
    told = ec2.describe_instance_attribute(InstanceId=machine, Attribute="instanceInitiatedShutdownBehavior")
    assert told["InstanceInitiatedShutdownBehavior"] == {"Value": "terminate"}
    (instance,) = ec2.describe_instances(InstanceIds=[machine])["Reservations"][0]["Instances"]
    assert [one["Ebs"]["DeleteOnTermination"] for one in instance["BlockDeviceMappings"]] == [True]


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


async def test_a_machine_outside_the_requested_place_is_refused(world: World) -> None:
    ec2, machine, cloud = world.ec2(), world.launch(), world.open()
    (instance,) = ec2.describe_instances(InstanceIds=[machine])["Reservations"][0]["Instances"]
    base = {"cloud": "aws", "region": EAST, "instance_type": "g6e.xlarge", "use_spot": False}
    vpc = Purchase(**base, config={"aws": {"vpc_name": "lab"}})  # type: ignore[arg-type]
    subnet = Purchase(**base, config={"aws": {"subnet_names": ["left", "right"]}})  # type: ignore[arg-type]
    for purchase, why in ((vpc, "VPC lab"), (subnet, "subnets"), (plain(placement_group="gb-aaaa-"), "placement")):
        with pytest.raises(Rejected, match=why):
            await cloud.confirm(handle(machine), purchase)
    ec2.create_tags(Resources=[instance["VpcId"]], Tags=[{"Key": "Name", "Value": "lab"}])
    ec2.create_tags(Resources=[instance["SubnetId"]], Tags=[{"Key": "Name", "Value": "right"}])
    for purchase in (vpc, subnet):
        await cloud.confirm(handle(machine), purchase)
