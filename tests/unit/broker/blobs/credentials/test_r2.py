"""R2's temporary credentials: the documented request, and the use of its answers."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.blobs.credentials.r2 import R2Issuer, account_of
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import Installation
from tests.unit.broker.blobs.credentials.samples import ATTEMPT, FINAL, JOB, LEASE, NOW, READS, SCOPE, WRITES, now
from tests.unit.broker.blobs.credentials.token_service import TokenRequest, serving
from trainer.contract.documents import READER
from trainer.objectstore.objects import Objects, ObjectStoreError

ENDPOINT = "https://0123abcd.r2.cloudflarestorage.com"


def _made(request: TokenRequest) -> tuple[int, Any]:
    kind = request.json["permission"]
    result = {
        "accessKeyId": f"id of {kind}",
        "secretAccessKey": f"secret of {kind}",
        "sessionToken": f"token of {kind}",
    }
    return 200, {"success": True, "errors": [], "messages": [], "result": result}


def _issuer(api: str) -> R2Issuer:
    return R2Issuer(api=api, account="0123abcd", parent="parent-id", token="api-token", life_s=1800, now=now)


async def test_one_set_reads_and_one_writes() -> None:
    async with serving(_made) as service:
        issued = await _issuer(service.url).issue(SCOPE)
    by_permission = {request.json["permission"]: request for request in service.requests}
    for request in service.requests:
        assert (request.method, request.path) == ("POST", "/accounts/0123abcd/r2/temp-access-credentials")
        assert request.headers["authorization"] == "Bearer api-token"
        assert request.headers["content-type"] == "application/json"
    common = {"bucket": "training", "parentAccessKeyId": "parent-id", "ttlSeconds": 1800}
    assert by_permission["object-read-only"].json == {
        **common, "permission": "object-read-only", "prefixes": READS, "objects": [LEASE],
    }  # fmt: skip
    assert by_permission["object-read-write"].json == {
        **common, "permission": "object-read-write", "prefixes": WRITES, "objects": [FINAL],
    }  # fmt: skip
    assert issued.expires_at == NOW + timedelta(seconds=1800)
    assert issued.options == {
        "aws_access_key_id": "id of object-read-write", "aws_secret_access_key": "secret of object-read-write",
        "aws_session_token": "token of object-read-write",
        "reader.aws_access_key_id": "id of object-read-only",
        "reader.aws_secret_access_key": "secret of object-read-only",
        "reader.aws_session_token": "token of object-read-only",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda request: (403, {"success": False, "errors": [{"code": 10000, "message": "Authentication error"}]}),
            "403 10000 Authentication error; give the API token",
        ),
        (lambda request: (502, "<html>Bad gateway</html>"), "502 with an answer that is not what is documented"),
        (lambda request: (200, {"success": True, "result": {}}), "200 with an answer that is not what is documented"),
        (lambda request: (200, ["?"]), "200 with an answer that is not what is documented"),
    ],
)
async def test_a_refusal_is_one_line_without_secrets(
    answer: Callable[[TokenRequest], tuple[int, Any]], words: str
) -> None:
    async with serving(answer) as service:
        with pytest.raises(BlobsUnavailable) as error:
            await _issuer(service.url).issue(SCOPE)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert "api-token" not in str(error.value) + repr(_issuer(""))


async def test_the_agent_reads_with_one_and_writes_with_the_other() -> None:
    async with serving(lambda request: (404, "") if request.method == "GET" else (200, "")) as service:
        options = {"aws_endpoint": service.url, "aws_region": "auto"}
        for name, who in (("", "writer"), (READER, "reader")):
            options |= {f"{name}aws_access_key_id": who, f"{name}aws_secret_access_key": "x"}
        objects = Objects.open("s3://training", options, "abcd")
        assert await objects.read("broker/lease") is None
        with contextlib.suppress(ObjectStoreError):
            await objects.keys(f"checkpoints/{JOB}/")
        with contextlib.suppress(ObjectStoreError):
            await objects.write(f"heartbeats/{ATTEMPT}/0", b"1")
        with contextlib.suppress(ObjectStoreError):
            await objects.delete(f"checkpoints/{JOB}/{ATTEMPT}/x")
    used = [
        (request.method, request.headers["authorization"].split("Credential=")[1].split("/")[0])
        for request in service.requests
    ]
    assert used == [("GET", "reader"), ("GET", "reader"), ("PUT", "writer"), ("POST", "writer")]


async def test_a_store_at_r2_scopes_once_there_is_an_api_token(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"aws_endpoint": ENDPOINT, "aws_access_key_id": "parent-id", "aws_secret_access_key": "own"}
    monkeypatch.delenv("CLOUDFLARE_API_TOKEN", raising=False)
    here = Installation("abcd")
    without = ObstoreBlobs.open("s3://training", here, options=options)
    assert not without.scopes
    assert "set CLOUDFLARE_API_TOKEN" in (without.unscoped or "")
    monkeypatch.setenv("CLOUDFLARE_API_TOKEN", "api-token")
    async with serving(_made) as service:
        blobs = ObstoreBlobs.open("s3://training", here, options=options, grants=GrantSettings(r2_api=service.url))
        access = await blobs.grant(JOB, ATTEMPT)
    assert (blobs.scopes, access.scoped) == (True, True)
    assert access.options["aws_endpoint"] == ENDPOINT
    assert "own" not in access.options.values()


@pytest.mark.parametrize(
    ("endpoint", "account"),
    [
        (ENDPOINT, "0123abcd"), ("https://0123abcd.eu.r2.cloudflarestorage.com/bucket", "0123abcd"),
        ("https://s3.amazonaws.com", None), (None, None),
    ],
)  # fmt: skip
def test_the_account_is_in_the_endpoint(endpoint: str | None, account: str | None) -> None:
    assert account_of(endpoint) == account
