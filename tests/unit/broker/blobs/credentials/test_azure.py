"""The signature of a container is the one that Microsoft's own generator makes."""

from datetime import timedelta
from urllib.parse import parse_qs

import pytest

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.blobs.credentials.azure import AzureIssuer, container_signature
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import Installation
from tests.unit.broker.blobs.credentials.samples import ATTEMPT, JOB, NOW, SCOPE, now
from tests.unit.broker.blobs.credentials.token_service import serving
from trainer.objectstore.objects import Objects

KEY = "bm90IGEgcmVhbCBrZXksIG9ubHkgZm9yIHRlc3Rz"
FROM_THE_SDK = "WuvE4HQYHrvBv2CsIzjPdGQQ+tVmXZ4Dx7U0/dscDrA="
"""azure-storage-blob 12.31.1, version 2022-11-02: account `acct`, container `training`, `rwdl`, https, ends at NOW."""


def test_the_signature_equals_the_sdks() -> None:
    token = parse_qs(container_signature("acct", KEY, "training", NOW, "https"), strict_parsing=True)
    assert token == {
        "sv": ["2022-11-02"], "sr": ["c"], "sp": ["rwdl"], "se": ["2026-01-02T03:04:05Z"], "spr": ["https"],
        "sig": [FROM_THE_SDK],
    }  # fmt: skip


async def test_an_azure_grant_expires_and_holds_no_account_key() -> None:
    issuer = AzureIssuer(account="acct", key=KEY, life_s=600, protocol="https", now=now)
    issued = await issuer.issue(SCOPE)
    assert issued.expires_at == NOW + timedelta(seconds=600)
    assert not issuer.scoped
    assert set(issued.options) == {"azure_storage_sas_token"}
    assert KEY not in repr(issuer)


async def test_the_instance_sends_only_the_signature() -> None:
    async with serving(lambda request: (404, "")) as service:
        options = {
            "azure_storage_account_name": "acct", "azure_storage_account_key": KEY,
            "azure_storage_endpoint": service.url,
        }  # fmt: skip
        settings = GrantSettings(now=now)
        blobs = ObstoreBlobs.open("az://training/team", Installation("abcd"), options=options, grants=settings)
        access = await blobs.grant(JOB, ATTEMPT)
        assert (access.scoped, blobs.scopes) == (False, False)
        assert "community hosts are refused: Azure cannot sign for several prefixes" in (blobs.unscoped or "")
        assert "azure_storage_account_key" not in access.options
        objects = Objects.open(access.url, access.options, "abcd")
        assert await objects.read("broker/lease") is None
        request = service.requests[0]
    path, _, query = request.path.partition("?")
    assert path == "/training/team/abcd/broker/lease"
    assert parse_qs(query)["sig"] == parse_qs(access.options["azure_storage_sas_token"])["sig"]
    assert "authorization" not in request.headers


async def test_a_malformed_account_key_is_reported() -> None:
    issuer = AzureIssuer(account="acct", key="not base64!", life_s=600, protocol="https", now=now)
    with pytest.raises(BlobsUnavailable, match="copy AZURE_STORAGE_ACCOUNT_KEY again"):
        await issuer.issue(SCOPE)
