"""What our plugin changes in SkyPilot's AWS: no role, and what SkyPilot has no setting for."""

from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from sky.adaptors import aws

from providers.skypilot.plugin.patch import Replacement, pin

LEFT_S = 3600
"""A placement group is asked machines for within seconds: one that is older was filled, and is empty again."""


def no_instance_role(original: Replacement) -> Replacement:
    """SkyPilot would create and attach a role with all rights on EC2 and S3, which anybody on the machine can use."""

    def _configure_iam_role(iam: Any) -> dict[str, str]:
        return {}

    return _configure_iam_role


def machine_as_bought(original: Replacement) -> Replacement:
    """No role where we asked for none; a machine that shuts down is gone; our KMS key and placement group."""

    def bootstrap_instances(region: str, cluster_name: str, config: Any) -> Any:
        config = original(region, cluster_name, config)
        node, bought = config.node_config, pin()
        if not node.get("IamInstanceProfile"):
            node.pop("IamInstanceProfile", None)
        node["InstanceInitiatedShutdownBehavior"] = "terminate"
        for disk in node["BlockDeviceMappings"] if "kms_key" in bought else ():
            disk["Ebs"] |= {"KmsKeyId": bought["kms_key"], "Encrypted": True}
        if "placement_group" in bought:
            group = _placement_group(aws.client("ec2", region_name=region), cluster_name, bought["placement_group"])
            node["Placement"] = {**node.get("Placement", {}), "GroupName": group}
        return config

    return bootstrap_instances


def _placement_group(ec2: Any, cluster: str, prefix: str) -> str:
    """A new group; its name ends in the time of its creation by AWS's clock, which all brokers share.

    Groups of machines that are gone are deleted here: with their machines, which need minutes to go, they cannot be.
    One in use AWS refuses to delete. Another launch's is empty until its machines are asked for: only an old one goes.
    """
    found = ec2.describe_placement_groups()
    now = int(parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp())
    for name in (group["GroupName"] for group in found["PlacementGroups"]):
        owner, _, made = name.rpartition("-")
        if owner.startswith(prefix) and made.isdigit() and (owner == cluster or now - int(made) > LEFT_S):
            with suppress(aws.botocore_exceptions().ClientError):
                ec2.delete_placement_group(GroupName=name)
    fresh = f"{cluster}-{now}"
    ec2.create_placement_group(GroupName=fresh, Strategy="cluster")
    return fresh
