"""STS: the keys that sign its requests, and unusable answers. tests/grants makes the calls, against moto."""

import sys
from pathlib import Path

import pytest

from broker.blobs.credentials.sts import StsIssuer, sdk_keys
from broker.domain.errors import BlobsUnavailable
from tests.unit.broker.blobs.credentials.samples import SCOPE, now
from tests.unit.broker.blobs.credentials.token_service import serving


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def _issuer(endpoint: str) -> StsIssuer:
    return StsIssuer(endpoint=endpoint, region="eu-west-1", role_arn="arn", keys=None, life_s=60, now=now)


async def test_keys_of_a_profile_sign_when_the_store_has_none(no_keys: None, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = of-a-profile\naws_secret_access_key = x\n")
    async with serving(lambda request: (403, "<a><Code>AccessDenied</Code><Message>not you</Message></a>")) as service:
        with pytest.raises(BlobsUnavailable, match="403 AccessDenied not you; let the daemon's identity call"):
            await _issuer(service.url).issue(SCOPE)
    request = service.requests[0]
    assert "Credential=of-a-profile/20260102/eu-west-1/sts/aws4_request" in request.headers["authorization"]
    assert request.form["DurationSeconds"] == "900"


@pytest.mark.usefixtures("no_keys")
def test_no_keys_at_all_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BlobsUnavailable, match="no AWS credentials; run `aws configure`"):
        sdk_keys()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(BlobsUnavailable, match=r"set AWS_ACCESS_KEY_ID .* or pip install 'gpubroker\[aws\]'"):
        sdk_keys()


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, "<a><AccessKeyId>k</AccessKeyId></a>", "an answer without 'SecretAccessKey'"),
        (200, "not xml", "an answer without"),
        (502, "bad gateway", "502"),
    ],
)
async def test_a_malformed_answer_of_sts_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: str, words: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    async with serving(lambda request: (status, answer)) as service:
        with pytest.raises(BlobsUnavailable, match=words) as error:
            await _issuer(service.url).issue(SCOPE)
    assert "\n" not in str(error.value)


async def test_a_service_that_is_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    async with serving(lambda request: (200, "")) as service:
        gone = service.url
    with pytest.raises(BlobsUnavailable, match="STS: no credentials for the attempt: ClientConnectorError"):
        await _issuer(gone).issue(SCOPE)
