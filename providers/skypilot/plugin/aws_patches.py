"""Changes that the plugin makes in SkyPilot's AWS code: no instance role, and options that SkyPilot lacks."""

import os
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from sky.adaptors import aws
from sky.utils import common_utils

from .host_keys import user_data_with_host_key
from .patch import Replacement, pin, state_folder
from .shared import PIN

UNUSED_GROUP_S = 3600
"""Age in seconds from which an empty placement group is deleted.

A new group gets its machines within seconds, so an older empty group has lost its machines.
"""


def no_instance_role(original: Replacement) -> Replacement:
    """Return a function that attaches no role.

    SkyPilot would create a role with all rights on EC2 and S3, which every program on the machine can use.
    """

    def _configure_iam_role(iam: Any) -> dict[str, str]:
        return {}

    return _configure_iam_role


def machine_as_bought(original: Replacement) -> Replacement:
    """Return `bootstrap_instances` that changes the machine's configuration.

    It removes an empty role, makes a shutdown terminate the machine, and sets KMS key and placement group. The machines
    of our launches get a host key.
    """

    def bootstrap_instances(region: str, cluster_name: str, config: Any) -> Any:
        config = original(region, cluster_name, config)
        node, purchase_pin = config.node_config, pin()
        if not node.get("IamInstanceProfile"):
            node.pop("IamInstanceProfile", None)
        node["InstanceInitiatedShutdownBehavior"] = "terminate"
        for disk in node["BlockDeviceMappings"] if "kms_key" in purchase_pin else ():
            disk["Ebs"] |= {"KmsKeyId": purchase_pin["kms_key"], "Encrypted": True}
        if "placement_group" in purchase_pin:
            group = _placement_group(
                aws.client("ec2", region_name=region), cluster_name, purchase_pin["placement_group"]
            )
            node["Placement"] = {**node.get("Placement", {}), "GroupName": group}
        if PIN in os.environ and isinstance(node.get("UserData"), str):
            name = cluster_name.removesuffix(f"-{common_utils.get_user_hash()}")
            node["UserData"] = user_data_with_host_key(node["UserData"], state_folder(), name)
        return config

    return bootstrap_instances


def _placement_group(ec2: Any, cluster: str, prefix: str) -> str:
    """Create a placement group and return its name, which ends in its creation time by AWS's clock.

    All brokers share AWS's clock. The function also deletes groups of earlier machines: a group cannot be deleted
    together with its machines, whose termination takes minutes. AWS refuses to delete a group in use. The group of
    another launch is empty before its create, so only groups older than `UNUSED_GROUP_S` are deleted.
    """
    answer = ec2.describe_placement_groups()
    now = int(parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp())
    for name in (group["GroupName"] for group in answer["PlacementGroups"]):
        owner, _, created = name.rpartition("-")
        if owner.startswith(prefix) and created.isdigit() and (owner == cluster or now - int(created) > UNUSED_GROUP_S):
            with suppress(aws.botocore_exceptions().ClientError):
                ec2.delete_placement_group(GroupName=name)
    fresh = f"{cluster}-{now}"
    ec2.create_placement_group(GroupName=fresh, Strategy="cluster")
    return fresh
