"""Checks of a machine that SkyPilot launched on AWS; a wrong attribute is corrected, if possible, and read back."""

from collections.abc import Mapping
from typing import Any, cast

from broker.domain.errors import Rejected
from broker.domain.job import Handle
from providers.aws.api import Aws
from providers.common.cloud import Purchase

SHUTDOWN_ATTRIBUTE = "instanceInitiatedShutdownBehavior"


async def confirm(aws: Aws, handle: Handle, purchase: Purchase) -> None:
    """Raise Rejected if the machine differs from the purchase; the caller then destroys it."""
    machine = await _machine(aws, handle)
    if role := machine.get("IamInstanceProfile"):
        raise Rejected(
            f"AWS: {handle.id} carries the role {role.get('Arn')}, whose rights every program on it would have"
        )
    await _set_terminate_on_shutdown(aws, handle)
    await _check_volumes(aws, handle, machine, purchase)
    await _check_network(aws, handle, machine, purchase)


async def _machine(aws: Aws, handle: Handle) -> Mapping[str, Any]:
    answer = await aws.call("ec2", handle.region, "describe_instances", InstanceIds=[handle.id])
    machines = [machine for reservation in answer["Reservations"] for machine in reservation["Instances"]]
    if not machines:
        raise Rejected(f"AWS: {handle.id} is not described in {handle.region}")
    return cast("Mapping[str, Any]", machines[0])


async def _set_terminate_on_shutdown(aws: Aws, handle: Handle) -> None:
    """Make a shutdown terminate the machine, because a stopped machine's disk is billed. Raises Rejected."""
    if await _shutdown(aws, handle) == "terminate":
        return
    await aws.call(
        "ec2",
        handle.region,
        "modify_instance_attribute",
        InstanceId=handle.id,
        Attribute=SHUTDOWN_ATTRIBUTE,
        Value="terminate",
    )
    if (behavior := await _shutdown(aws, handle)) != "terminate":
        raise Rejected(f"AWS: {handle.id} would {behavior} when it shuts down, and cannot be set to terminate")


async def _shutdown(aws: Aws, handle: Handle) -> str:
    answer = await aws.call(
        "ec2", handle.region, "describe_instance_attribute", InstanceId=handle.id, Attribute=SHUTDOWN_ATTRIBUTE
    )
    return str(answer["InstanceInitiatedShutdownBehavior"].get("Value", ""))


async def _check_volumes(aws: Aws, handle: Handle, machine: Mapping[str, Any], purchase: Purchase) -> None:
    """Make all volumes end with the machine. Raises Rejected if one is not encrypted as the job requires."""
    mappings = machine.get("BlockDeviceMappings", [])
    disks = {mapping["DeviceName"]: mapping["Ebs"] for mapping in mappings if "Ebs" in mapping}
    lasting = [device for device, disk in disks.items() if not disk.get("DeleteOnTermination")]
    if lasting:
        await aws.call(
            "ec2", handle.region, "modify_instance_attribute", InstanceId=handle.id,
            BlockDeviceMappings=[{"DeviceName": device, "Ebs": {"DeleteOnTermination": True}} for device in lasting],
        )  # fmt: skip
    config = cast("Mapping[str, Any]", purchase.config.get("aws", {}))
    if not config.get("disk_encrypted") or not disks:
        return
    ids = [disk["VolumeId"] for disk in disks.values()]
    volumes = (await aws.call("ec2", handle.region, "describe_volumes", VolumeIds=ids))["Volumes"]
    if any(not volume["Encrypted"] for volume in volumes):
        raise Rejected(f"AWS: {handle.id} has a volume that is not encrypted; the job asks for encrypted_volume")
    if (key := purchase.pin.get("kms_key")) is not None:
        answer = await aws.call("kms", handle.region, "describe_key", KeyId=key)
        arn = answer["KeyMetadata"]["Arn"]
        if any(volume.get("KmsKeyId") != arn for volume in volumes):
            raise Rejected(f"AWS: {handle.id} has a volume that is not encrypted with {key}")


async def _check_network(aws: Aws, handle: Handle, machine: Mapping[str, Any], purchase: Purchase) -> None:
    config = cast("Mapping[str, Any]", purchase.config.get("aws", {}))
    group_prefix = purchase.pin.get("placement_group")
    group = (machine.get("Placement") or {}).get("GroupName", "")
    if group_prefix is not None and not group.startswith(group_prefix):
        raise Rejected(f"AWS: {handle.id} is not in a placement group of ours, so its network is slow")
    if (vpc := config.get("vpc_name")) is not None:
        answer = await aws.call("ec2", handle.region, "describe_vpcs", VpcIds=[machine["VpcId"]])
        if _name(answer["Vpcs"][0]) != vpc:
            raise Rejected(f"AWS: {handle.id} is in {machine['VpcId']}, not in the VPC {vpc}")
    if subnets := config.get("subnet_names"):
        answer = await aws.call("ec2", handle.region, "describe_subnets", SubnetIds=[machine["SubnetId"]])
        if _name(answer["Subnets"][0]) not in subnets:
            raise Rejected(f"AWS: {handle.id} is in {machine['SubnetId']}, in none of the subnets that the job names")


def _name(resource: Mapping[str, Any]) -> str | None:
    return next((str(tag["Value"]) for tag in resource.get("Tags", []) if tag["Key"] == "Name"), None)
