"""S3: temporary credentials from STS, limited by a session policy.

The credentials have the rights that the session policy and the identity both allow. The identity is a role for
AssumeRole, and a user for GetFederationToken.
https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html, API_GetFederationToken.html
"""

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlencode

from broker.blobs.credentials.base import Issued, post, refused
from broker.blobs.credentials.scope import Scope
from broker.blobs.credentials.sigv4 import Keys, signed_headers

LEAST_S, MAX_S = 900, 43_200
"""Lifetimes in seconds that AssumeRole accepts. GetFederationToken has the same minimum and a higher maximum."""
POLICY_LIMIT = 2048
FIX = {
    "role": "let the daemon's identity call sts:AssumeRole on the role, for the asked time",
    "user": "give the daemon's IAM user sts:GetFederationToken, or set grants.role_arn",
}


@dataclass(frozen=True, kw_only=True)
class StsIssuer:
    """Issuer by AWS STS. `role_arn`: the role that is assumed; None: the user's long-lived keys are federated."""

    endpoint: str
    region: str
    role_arn: str | None
    keys: Keys | None = field(repr=False)
    """Long-lived keys; None: use the credentials that the AWS SDK provides (instance profile, SSO, profile)."""
    life_s: int
    now: Callable[[], datetime]

    @property
    def scoped(self) -> bool:
        return True

    async def issue(self, scope: Scope) -> Issued:
        body = urlencode(self._question(scope)).encode()
        own = self.keys
        if own is None:
            own = await asyncio.to_thread(sdk_keys)
        headers = signed_headers(self.endpoint, body, own, region=self.region, service="sts", now=self.now())
        status, answer = await post("STS", self.endpoint, headers=headers, body=body)
        if status != 200:
            fix = FIX["role" if self.role_arn else "user"] if status in (401, 403) else ""
            raise refused("STS", _error(status, answer), fix)
        return _issued(answer)

    def _question(self, scope: Scope) -> dict[str, str]:
        kms = ".amazonaws.com" in self.endpoint
        text = json.dumps(session_policy(scope, self.region, kms=kms), separators=(",", ":"))
        if len(text) > POLICY_LIMIT:
            fix = "use a bucket with a shorter name or prefix"
            raise refused("STS", f"the session policy has {len(text)} of at most {POLICY_LIMIT} characters", fix)
        parameters = {"Version": "2011-06-15", "DurationSeconds": str(min(MAX_S, max(LEAST_S, self.life_s)))}
        if self.role_arn is None:
            return parameters | {"Action": "GetFederationToken", "Name": f"gb-{scope.attempt}", "Policy": text}
        return parameters | {
            "Action": "AssumeRole", "RoleArn": self.role_arn, "RoleSessionName": f"gb-{scope.attempt}", "Policy": text,
        }  # fmt: skip


def session_policy(scope: Scope, region: str, *, kms: bool) -> dict[str, object]:
    """Return the minimal policy of an agent.

    `kms`: allow also the use of customer-managed encryption keys, through S3 only.
    """
    bucket = f"arn:{partition(region)}:s3:::{scope.bucket}"

    def below(*prefixes: str) -> list[str]:
        return [f"{bucket}/{prefix}*" for prefix in prefixes]

    def exactly(*objects: str) -> list[str]:
        return [f"{bucket}/{key}" for key in objects]

    statements = [
        _allow(["s3:GetObject"], below(*scope.read_prefixes) + exactly(*scope.read_objects)),
        _allow(["s3:PutObject"], below(*scope.write_prefixes) + exactly(*scope.write_objects)),
        _allow(["s3:DeleteObject", "s3:AbortMultipartUpload"], below(scope.own_checkpoints)),
        _allow(["s3:ListBucket"], [bucket], {"s3:prefix": [f"{prefix}*" for prefix in scope.list_prefixes]}),
    ]
    if kms:
        statements.append(_allow(["kms:Decrypt", "kms:GenerateDataKey"], ["*"], {"kms:ViaService": ["s3.*"]}))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(actions: list[str], resources: list[str], like: dict[str, list[str]] | None = None) -> dict[str, object]:
    statement: dict[str, object] = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return statement | {"Condition": {"StringLike": like}} if like else statement


def partition(region: str) -> str:
    """Return the partition in the ARNs of a region."""
    if region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region.startswith("us-gov-") else "aws"


def endpoint_of(region: str) -> str:
    """Return the URL of a region's STS."""
    return f"https://sts.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}/"


def static_keys(options: Mapping[str, str]) -> Keys | None:
    """Return the keys among a store's options; None: there are none."""
    access, secret = (options.get(f"aws_{n}") or options.get(n) for n in ("access_key_id", "secret_access_key"))
    if not access or not secret:
        return None
    token = next(
        (options[n] for n in ("aws_session_token", "session_token", "aws_token", "token") if n in options), None
    )
    return Keys(access_key=access, secret_key=secret, session_token=token)


def sdk_keys() -> Keys:
    """Return the keys of the AWS SDK: from a profile, SSO or the instance's role. Raises BlobsUnavailable."""
    try:
        import boto3  # of the `aws` extra
    except ImportError:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pip install 'gpubroker[aws]'"
        raise refused("STS", "no AWS keys in the environment, and no AWS SDK to find others", fix) from None
    credentials = boto3.Session().get_credentials()
    if credentials is None:
        raise refused("STS", "no AWS credentials", "run `aws configure`")
    frozen = credentials.get_frozen_credentials()
    return Keys(access_key=frozen.access_key, secret_key=frozen.secret_key, session_token=frozen.token)


def _issued(answer: bytes) -> Issued:
    try:
        root = ElementTree.fromstring(answer)
        fields = {node.tag.rpartition("}")[2]: (node.text or "").strip() for node in root.iter()}
        options = {
            "aws_access_key_id": fields["AccessKeyId"],
            "aws_secret_access_key": fields["SecretAccessKey"],
            "aws_session_token": fields["SessionToken"],
        }
        return Issued(options=options, expires_at=datetime.fromisoformat(fields["Expiration"]))
    except (ElementTree.ParseError, KeyError, ValueError) as e:
        raise refused("STS", f"an answer without {e}") from None


def _error(status: int, answer: bytes) -> str:
    try:
        fields = {node.tag.rpartition("}")[2]: node.text or "" for node in ElementTree.fromstring(answer).iter()}
    except ElementTree.ParseError:
        fields = {}
    return f"{status} {fields.get('Code', '')} {fields.get('Message', '')}"
