"""deploy/iam: enough for SkyPilot's launch and for our own calls, and not for more.

Two halves: moto evaluates neither conditions nor resources of EC2's actions (a statement applies to `*` or not at all).
With moto the tests show that the actions suffice and that others are refused. Conditions and resources are evaluated
here by the rules of IAM.
"""

import asyncio
import fnmatch
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import boto3
import pytest
from botocore.exceptions import ClientError

from broker.domain.errors import Gone, Rejected
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.instance import InstanceState
from providers.aws.provider import REGIONS, AwsCloud, AwsConfig
from providers.common.cloud import Purchase
from tests.support.skypilot import sky_python
from tests.unit.providers.aws_front import IMAGE, moto_server
from tests.unit.providers.clocks import SteppedClock

FOLDER = Path(__file__).parents[4] / "deploy" / "iam"
POLICY: Mapping[str, Any] = json.loads((FOLDER / "aws.json").read_text())
PRICES: Mapping[str, Any] = json.loads((FOLDER / "aws-prices.json").read_text())
OURS = Installation("aaaa")
NAME = instance_name(OURS, AttemptId("b" * 13))
REGION = "us-east-1"
ROOT = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
KEYS = {
    "region": "aws:RequestedRegion",
    "new_cluster": "aws:RequestTag/skypilot-cluster-name",
    "cluster": "aws:ResourceTag/skypilot-cluster-name",
    "new_skypilot": "aws:RequestTag/skypilot",
    "skypilot": "aws:ResourceTag/skypilot",
    "kind": "ec2:InstanceType",
    "role": "ec2:InstanceProfile",
    "by": "ec2:CreateAction",
    "via": "kms:ViaService",
}
EC2 = f"arn:aws:ec2:{REGION}:123456789012:"

# --------------------------------------------------------------------------------------------------- IAM, as AWS has it


def allowed(action: str, resource: str, **context: str) -> bool:
    """Return IAM's verdict: a deny that applies wins; otherwise one allow must apply. `context`: condition keys by the
    names of `KEYS`.
    """
    told = {KEYS[name]: value for name, value in context.items()}
    applying = [one["Effect"] for one in POLICY["Statement"] if _applies(one, action, resource, told)]
    return "Allow" in applying and "Deny" not in applying


def _applies(statement: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]) -> bool:
    return (
        any(_like(action.lower(), one.lower()) for one in _list(statement["Action"]))
        and any(_like(resource, one) for one in _list(statement["Resource"]))
        and all(_holds(op, keys, context) for op, keys in statement.get("Condition", {}).items())
    )


def _holds(operator: str, keys: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    match operator:
        case "StringEquals":
            return all(context.get(key) in _list(values) for key, values in keys.items())
        case "StringLike":
            return all(key in context and any(_like(context[key], v) for v in _list(vs)) for key, vs in keys.items())
        case "Null":
            return all((key not in context) == (value == "true") for key, value in keys.items())
    raise AssertionError(f"{operator}: teach this test to evaluate it")


def _like(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern)


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def may_run(**changes: str | None) -> bool:
    """Return True if every resource of a launch is allowed, each in its own context."""
    wanted = {"region": REGION, "new_cluster": f"{NAME}-1a2b3c4d", "kind": "g6e.xlarge", **changes}
    instance = {key: value for key, value in wanted.items() if value is not None}
    needed = [f"{EC2}{one}" for one in ("subnet/s", "security-group/g", "network-interface/*", "volume/*")]
    needed.append(f"arn:aws:ec2:{REGION}::image/ami-1")
    return allowed("ec2:RunInstances", f"{EC2}instance/*", **instance) and all(
        allowed("ec2:RunInstances", one, region=instance["region"]) for one in needed
    )


# ----------------------------------------------------------------------------------------------- conditions, resources


def test_machines_are_launched_with_our_tag_types_and_regions_alone() -> None:
    assert may_run()
    assert not may_run(new_cluster=None)
    assert not may_run(new_cluster="somebody-elses")
    assert not may_run(kind="m7i.large")
    assert not may_run(kind="g5g.xlarge")
    assert not may_run(region="ap-south-1")
    assert not may_run(role="arn:aws:iam::123456789012:instance-profile/skypilot-v1")


def test_the_policys_regions_are_the_daemons() -> None:
    lists = [
        one["Condition"]["StringEquals"]["aws:RequestedRegion"]
        for one in POLICY["Statement"]
        if one["Action"] == "ec2:RunInstances" and one["Effect"] == "Allow"
    ]
    assert lists == [list(REGIONS), list(REGIONS)]


@pytest.mark.parametrize("action", ["TerminateInstances", "ModifyInstanceAttribute", "CreateTags"])
def test_only_our_machines_are_changed_or_ended(action: str) -> None:
    machine = f"{EC2}instance/i-1"
    assert allowed(f"ec2:{action}", machine, cluster=f"{NAME}-1a2b3c4d")
    assert not allowed(f"ec2:{action}", machine, cluster="web-1")
    assert not allowed(f"ec2:{action}", machine)


def test_tags_are_given_to_what_is_being_created() -> None:
    assert allowed("ec2:CreateTags", f"{EC2}volume/vol-1", by="RunInstances")
    assert not allowed("ec2:CreateTags", f"{EC2}volume/vol-1")
    assert not allowed("ec2:CreateTags", f"{EC2}instance/i-1", by="StartInstances")


def test_only_our_firewall_is_opened() -> None:
    group = f"{EC2}security-group/sg-1"
    for action in ("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"):
        assert allowed(f"ec2:{action}", group, skypilot="true")
        assert not allowed(f"ec2:{action}", group)
    assert allowed("ec2:CreateSecurityGroup", group, new_skypilot="true")
    assert not allowed("ec2:CreateSecurityGroup", group)
    assert not allowed("ec2:DeleteSecurityGroup", group, skypilot="true")


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("iam:PassRole", "arn:aws:iam::123456789012:role/x"), ("iam:CreateRole", "arn:aws:iam::123456789012:role/x"),
        ("ec2:StopInstances", f"{EC2}instance/i-1"), ("ec2:AssociateIamInstanceProfile", f"{EC2}instance/i-1"),
        ("ec2:DeleteVolume", f"{EC2}volume/vol-1"), ("ec2:DeletePlacementGroup", f"{EC2}placement-group/theirs"),
        ("s3:GetObject", "arn:aws:s3:::bucket/key"), ("kms:Decrypt", "arn:aws:kms:us-east-1:123456789012:key/k"),
        ("iam:CreateServiceLinkedRole", "arn:aws:iam::123456789012:role/aws-service-role/spot.amazonaws.com/R"),
    ],
)  # fmt: skip
def test_actions_outside_the_list_are_refused(action: str, resource: str) -> None:
    assert not allowed(action, resource, cluster=f"{NAME}-x")


def test_a_key_may_only_encrypt_volumes() -> None:
    key = f"arn:aws:kms:{REGION}:123456789012:key/k"
    for action in ("CreateGrant", "Decrypt", "GenerateDataKeyWithoutPlaintext"):
        assert allowed(f"kms:{action}", key, via=f"ec2.{REGION}.amazonaws.com")
        assert not allowed(f"kms:{action}", key, via=f"s3.{REGION}.amazonaws.com")


def test_the_policy_for_prices_only_reads() -> None:
    assert PRICES["Statement"] == POLICY["Statement"][:1]
    verbs = {re.sub(r"^.*:([A-Z][a-z]+).*", r"\1", action) for action in PRICES["Statement"][0]["Action"]}
    assert verbs == {"Describe", "Get", "List"}


# ------------------------------------------------------------------------------------------------- under moto's checks


def as_moto_reads(policy: Mapping[str, Any]) -> str:
    """Return the policy's allowed actions for all resources, which is all that moto evaluates."""
    actions = {one for s in policy["Statement"] if s["Effect"] == "Allow" for one in _list(s["Action"])}
    return json.dumps(
        {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}]}
    )


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
async def keys(moto: str) -> AsyncIterator[dict[str, str]]:
    """Yield keys of a user with the policy, in an account with internet access and with IAM enforced from then on."""
    async with aiohttp.ClientSession() as session:
        await session.post(f"{moto}/moto-api/reset")
        ec2 = boto3.client("ec2", region_name=REGION, endpoint_url=moto, **ROOT)
        (vpc,) = ec2.describe_vpcs()["Vpcs"]
        gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc["VpcId"])
        (table,) = ec2.describe_route_tables()["RouteTables"]
        ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
        iam = boto3.client("iam", region_name=REGION, endpoint_url=moto, **ROOT)
        iam.create_user(UserName="broker")
        iam.put_user_policy(UserName="broker", PolicyName="gpubroker", PolicyDocument=as_moto_reads(POLICY))
        made = iam.create_access_key(UserName="broker")["AccessKey"]
        await session.post(f"{moto}/moto-api/reset-auth", data=b"0")
        try:
            yield {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}
        finally:
            await session.post(f"{moto}/moto-api/reset-auth", data=b"inf")


SKYPILOT = """
import json, sys
from sky.provision import aws, common
from sky.provision.aws import config
from sky.utils import status_lib
region, cluster, image = sys.argv[1:]
config._configure_iam_role = lambda iam: {}
wanted = common.ProvisionConfig(
    provider_config={
        "region": region, "availability_zone": region + "a", "use_internal_ips": False, "max_efa_interfaces": 0,
        "security_group": {"GroupName": "sky-sg-test", "ManagedBySkyPilot": "true"},
    },
    authentication_config={}, docker_config={}, count=1, tags={}, resume_stopped_nodes=True,
    ports_to_open_on_launch=None,
    node_config={
        "InstanceType": "g6e.xlarge", "ImageId": image, "InstanceMarketOptions": {"MarketType": "spot"},
        "CapacityReservationSpecification": {"CapacityReservationPreference": "open"}, "UserData": "#cloud-config",
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True}}
        ],
        "MetadataOptions": {"HttpTokens": "required"},
    },
)
wanted = aws.bootstrap_instances(region, cluster, wanted)
wanted.node_config.pop("IamInstanceProfile")
record = aws.run_instances(region, cluster, cluster, wanted)
aws.wait_instances(region, cluster, status_lib.ClusterStatus.UP)
info = aws.get_cluster_info(region, cluster, wanted.provider_config)
print(json.dumps([record.head_instance_id, list(info.instances)]))
"""
"""Program of SkyPilot's part of a launch at AWS, as its API server runs it with our plugin: no role."""


async def skypilot_launches(moto: str, keys: Mapping[str, str], home: Path) -> str:
    """Return the instance's id."""
    env = {
        **keys, "PATH": os.environ["PATH"], "HOME": str(home), "SKY_RUNTIME_DIR": str(home), "AWS_ENDPOINT_URL": moto,
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sky_python(), "-P", "-c", SKYPILOT, REGION, f"{NAME}-1a2b3c4d", IMAGE,
        env=env, cwd=home, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, err.decode()[-3000:]
    head, (only,) = json.loads(out.decode().splitlines()[-1])
    assert head == only
    return str(head)


async def test_skypilots_launch_and_our_own_calls_need_no_more(moto: str, keys: dict[str, str], tmp_path: Path) -> None:
    machine = await skypilot_launches(moto, keys, tmp_path)
    config = AwsConfig(endpoint=moto, regions=(REGION,))
    cloud = AwsCloud(config, installation=OURS, clock=SteppedClock(), env=keys, home=tmp_path)
    try:
        assert await cloud.check() is None
        (seen,) = await cloud.list()
        assert (seen.handle.id, seen.handle.name, seen.spot, seen.accelerator) == (machine, NAME, True, "l40s")
        purchase = Purchase(
            cloud="aws", region=REGION, instance_type="g6e.xlarge", use_spot=True,
            config={"aws": {"disk_encrypted": True}},
        )  # fmt: skip
        await cloud.confirm(seen.handle, purchase)
        await cloud.destroy(seen.handle)
        assert [one.state for one in await cloud.list()] == [InstanceState.GONE]
        with pytest.raises(Gone):
            await cloud.destroy(seen.handle)
    finally:
        await cloud.close()


async def test_actions_outside_the_policy_are_refused(moto: str, keys: dict[str, str]) -> None:
    ec2, iam, sqs = (
        boto3.client(
            service, region_name=REGION, endpoint_url=moto,
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"], aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        )
        for service in ("ec2", "iam", "sqs")
    )  # fmt: skip
    forbidden = [
        lambda: ec2.stop_instances(InstanceIds=["i-0123456789abcdef0"]),
        lambda: ec2.create_key_pair(KeyName="x"),
        lambda: ec2.create_vpc(CidrBlock="10.0.0.0/16"),
        lambda: ec2.delete_security_group(GroupId="sg-1"),
        lambda: iam.create_user(UserName="x"),
        lambda: iam.create_access_key(UserName="broker"),
        lambda: iam.list_roles(),
        lambda: sqs.list_queues(),
    ]
    for call in forbidden:
        with pytest.raises(ClientError) as refused:
            await asyncio.to_thread(call)
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


async def test_a_broker_without_the_policy_is_shown_which_one_it_needs(
    moto: str, keys: dict[str, str], tmp_path: Path
) -> None:
    wrong = {**keys, "AWS_SECRET_ACCESS_KEY": "wrong"}
    cloud = AwsCloud(
        AwsConfig(endpoint=moto, regions=(REGION,)), installation=OURS, clock=SteppedClock(), env=wrong, home=tmp_path
    )
    try:
        with pytest.raises(Rejected, match="aws configure") as refused:
            await cloud.check()
        assert "\n" not in str(refused.value)
    finally:
        await cloud.close()
