"""What must hold of a machine that SkyPilot launched on AWS, set right where that is possible, and read back."""

from collections.abc import Mapping
from typing import Any, cast

from broker.domain.errors import Rejected
from broker.domain.job import Handle
from providers.aws.api import Aws
from providers.common.cloud import Purchase

SHUTDOWN = "instanceInitiatedShutdownBehavior"


async def confirm(aws: Aws, handle: Handle, purchase: Purchase) -> None:
    """Raises Rejected: what is wrong with the machine, which is then destroyed."""
    machine = await _machine(aws, handle)
    if role := machine.get("IamInstanceProfile"):
        raise Rejected(f"AWS: {handle.id} carries the role {role.get('Arn')}, whose rights anybody on it would have")
    await _ends_by_shutdown(aws, handle)
    await _volumes(aws, handle, machine, purchase)
    await _place(aws, handle, machine, purchase)


async def _machine(aws: Aws, handle: Handle) -> Mapping[str, Any]:
    found = await aws.call("ec2", handle.region, "describe_instances", InstanceIds=[handle.id])
    machines = [one for reservation in found["Reservations"] for one in reservation["Instances"]]
    if not machines:
        raise Rejected(f"AWS: {handle.id} is not described in {handle.region}")
    return cast("Mapping[str, Any]", machines[0])


async def _ends_by_shutdown(aws: Aws, handle: Handle) -> None:
    """A machine that shuts itself down must be gone, not stopped with a disk that bills on."""
    if await _shutdown(aws, handle) == "terminate":
        return
    await aws.call(
        "ec2", handle.region, "modify_instance_attribute", InstanceId=handle.id, Attribute=SHUTDOWN, Value="terminate"
    )
    if (now := await _shutdown(aws, handle)) != "terminate":
        raise Rejected(f"AWS: {handle.id} would {now} when it shuts down, and cannot be told to terminate")


async def _shutdown(aws: Aws, handle: Handle) -> str:
    told = await aws.call("ec2", handle.region, "describe_instance_attribute", InstanceId=handle.id, Attribute=SHUTDOWN)
    return str(told["InstanceInitiatedShutdownBehavior"].get("Value", ""))


async def _volumes(aws: Aws, handle: Handle, machine: Mapping[str, Any], purchase: Purchase) -> None:
    """They end with the machine, and are encrypted as the job asked."""
    disks = {one["DeviceName"]: one["Ebs"] for one in machine.get("BlockDeviceMappings", []) if "Ebs" in one}
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
    found = await aws.call("ec2", handle.region, "describe_volumes", VolumeIds=ids)
    if any(not volume["Encrypted"] for volume in found["Volumes"]):
        raise Rejected(f"AWS: {handle.id} has a volume that is not encrypted; the job asks for encrypted_volume")
    if (key := purchase.pin.get("kms_key")) is not None:
        told = await aws.call("kms", handle.region, "describe_key", KeyId=key)
        arn = told["KeyMetadata"]["Arn"]
        if any(volume.get("KmsKeyId") != arn for volume in found["Volumes"]):
            raise Rejected(f"AWS: {handle.id} has a volume that is not encrypted with {key}")


async def _place(aws: Aws, handle: Handle, machine: Mapping[str, Any], purchase: Purchase) -> None:
    config = cast("Mapping[str, Any]", purchase.config.get("aws", {}))
    wanted = purchase.pin.get("placement_group")
    if wanted is not None and not (machine.get("Placement") or {}).get("GroupName", "").startswith(wanted):
        raise Rejected(f"AWS: {handle.id} is not in a placement group of ours, so its network is slow")
    if (vpc := config.get("vpc_name")) is not None:
        found = await aws.call("ec2", handle.region, "describe_vpcs", VpcIds=[machine["VpcId"]])
        if _name(found["Vpcs"][0]) != vpc:
            raise Rejected(f"AWS: {handle.id} is in {machine['VpcId']}, not in the VPC {vpc}")
    if subnets := config.get("subnet_names"):
        found = await aws.call("ec2", handle.region, "describe_subnets", SubnetIds=[machine["SubnetId"]])
        if _name(found["Subnets"][0]) not in subnets:
            raise Rejected(f"AWS: {handle.id} is in {machine['SubnetId']}, in none of the subnets that the job names")


def _name(resource: Mapping[str, Any]) -> str | None:
    return next((str(tag["Value"]) for tag in resource.get("Tags", []) if tag["Key"] == "Name"), None)
