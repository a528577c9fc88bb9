"""Settings alone decide if a store issues scoped credentials."""

from typing import Any

import pytest

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.blobs.credentials.issuers import issuer_of, without_credentials
from broker.blobs.credentials.sts import StsIssuer, endpoint_of, partition, session_policy, static_keys
from broker.domain.ids import Installation
from tests.unit.broker.blobs.credentials.samples import SCOPE

USER = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "own"}
SESSION = USER | {"aws_session_token": "t"}
ROLE = "arn:aws:iam::1:role/x"
ELSEWHERE = {"aws_endpoint": "https://minio.example"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "settings", "endpoint"),
    [
        (USER, {}, "https://sts.us-east-1.amazonaws.com/"),
        (USER | {"aws_region": "cn-north-1"}, {}, "https://sts.cn-north-1.amazonaws.com.cn/"),
        (SESSION | {"aws_region": "eu-west-1"}, {"role_arn": ROLE}, "https://sts.eu-west-1.amazonaws.com/"),
        ({}, {"role_arn": ROLE}, "https://sts.us-east-1.amazonaws.com/"),
        (USER | ELSEWHERE, {"sts_endpoint": "https://minio.example/"}, "https://minio.example/"),
    ],
)
def test_s3_issues_scoped_credentials(options: dict[str, str], settings: dict[str, Any], endpoint: str) -> None:
    blobs = ObstoreBlobs.open("s3://b/p", Installation("abcd"), options=options, grants=GrantSettings(**settings))
    assert blobs.scopes
    assert blobs.unscoped is None
    issuer = issuer_of("s3://b/p", options, GrantSettings(**settings))
    assert isinstance(issuer, StsIssuer)
    assert (issuer.endpoint, issuer.role_arn) == (endpoint, settings.get("role_arn"))
    assert "own" not in repr(issuer)


@pytest.mark.parametrize(
    ("url", "options", "settings", "why"),
    [
        ("s3://b", USER, {"scope": False}, "grants.scope is false"),
        ("s3://b", SESSION, {}, "only keys of an IAM user can be federated; set grants.role_arn"),
        ("s3://b", {}, {}, "only keys of an IAM user"),
        ("s3://b", USER | ELSEWHERE, {}, "no STS is known at https://minio.example; set grants.sts_endpoint"),
        ("s3://b", USER | ELSEWHERE, {"role_arn": ROLE}, "no STS is known at https://minio.example"),
        ("gs://b", {"google_bearer_token": "t"}, {}, "set GOOGLE_SERVICE_ACCOUNT"),
        ("az://c", {"azure_storage_account_name": "a"}, {}, "set AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_a_store_that_cannot_says_why(url: str, options: dict[str, str], settings: dict[str, Any], why: str) -> None:
    blobs = ObstoreBlobs.open(url, Installation("abcd"), options=options, grants=GrantSettings(**settings))
    assert not blobs.scopes
    warning = blobs.unscoped or ""
    assert warning.startswith(f"blobs {url}: every instance gets the daemon's own credentials, so community hosts are")
    assert why in warning
    assert warning.endswith("see docs/guide/images-and-storage.md")


@pytest.mark.parametrize("url", ["memory://", "file:///tmp/x"])
def test_a_folder_store_gives_no_warning(url: str) -> None:
    blobs = ObstoreBlobs.open(url, Installation("abcd"))
    assert (blobs.scopes, blobs.unscoped) == (False, None)


def test_only_settings_go_with_issued_credentials() -> None:
    options = {
        "aws_endpoint": "e", "aws_region": "r", "aws_sse_kms_key_id": "arn", "aws_virtual_hosted_style_request": "true",
        "azure_storage_account_name": "n", "access_key_id": "x", "aws_secret_access_key": "x", "token": "x",
        "google_service_account": "x", "azure_client_secret": "x", "sas_key": "x", "azure_storage_account_key": "x",
        "aws_web_identity_token_file": "x", "aws_container_credentials_full_uri": "x",
    }  # fmt: skip
    assert set(without_credentials(options)) == {
        "aws_endpoint", "aws_region", "aws_sse_kms_key_id", "aws_virtual_hosted_style_request",
        "azure_storage_account_name",
    }  # fmt: skip


def test_keys_are_found_by_both_of_their_names() -> None:
    short = static_keys({"access_key_id": "a", "secret_access_key": "s", "session_token": "t"})
    assert short == static_keys({"aws_access_key_id": "a", "aws_secret_access_key": "s", "aws_session_token": "t"})
    assert static_keys({"aws_access_key_id": "a"}) is None


def test_arns_and_endpoints_of_other_partitions() -> None:
    assert [partition(r) for r in ("us-gov-west-1", "cn-north-1", "eu-west-1")] == ["aws-us-gov", "aws-cn", "aws"]
    assert endpoint_of("us-gov-west-1") == "https://sts.us-gov-west-1.amazonaws.com/"
    policy = str(session_policy(SCOPE, "cn-north-1", kms=True))
    assert "arn:aws:" not in policy
    assert "kms:GenerateDataKey" in policy
    assert "kms" not in str(session_policy(SCOPE, "eu-west-1", kms=False))
