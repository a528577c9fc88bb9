"""Which issuer a store has, and the reason when there is none."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from broker.blobs.credentials import azure, gcs, r2, sts
from broker.blobs.credentials.base import Issuer
from broker.domain.blob_url import scheme_of

_CREDENTIAL = re.compile(r"key|secret|token|credential|service_account|client|tenant|password|sas|role|authority")
_PLAIN = re.compile(r"sse|server_side_encryption")
"""Settings of encryption, which name keys but hold none."""
ADVICE = "see docs/guide/images-and-storage.md"


@dataclass(frozen=True, kw_only=True)
class GrantSettings:
    """How credentials for attempts are made."""

    scope: bool = True
    """False: the daemon's own are handed out."""
    life_s: int = 3600
    """Clamped to what the cloud allows."""
    role_arn: str | None = None
    """The role that is assumed for an attempt; without one an IAM user's keys are federated."""
    sts_endpoint: str | None = None
    """Of an S3 that is not AWS but has STS; and of tests."""
    r2_api: str = r2.API
    google_exchange: str = gcs.EXCHANGE
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


def issuer_of(url: str, options: Mapping[str, str], settings: GrantSettings) -> Issuer | str:
    """The issuer for this store, or why it has none, in words that end a sentence."""
    if not settings.scope:
        return "grants.scope is false"
    match scheme_of(url):
        case "s3":
            return _s3(options, settings)
        case "gs":
            account = gcs.service_account(options)
            if account is None:
                return "there is no service account key to make others from; set GOOGLE_SERVICE_ACCOUNT"
            return gcs.GcsIssuer(account=account, exchange=settings.google_exchange, now=settings.now)
        case "az":
            return _azure(options, settings)
    return "a folder has no credentials"


def without_credentials(options: Mapping[str, str]) -> dict[str, str]:
    """What an instance needs beside its own credentials: endpoint, region, names. In doubt an option stays here."""
    return {name: value for name, value in options.items() if _PLAIN.search(name) or not _CREDENTIAL.search(name)}


def _s3(options: Mapping[str, str], settings: GrantSettings) -> Issuer | str:
    endpoint = options.get("aws_endpoint") or options.get("aws_endpoint_url")
    keys = sts.static_keys(options)
    if (account := r2.account_of(endpoint)) is not None:
        token = os.environ.get(r2.TOKEN_VARIABLE)
        if not token or keys is None:
            return f"R2 makes them for an API token; set {r2.TOKEN_VARIABLE} and the AWS_* keys of R2"
        return r2.R2Issuer(
            api=settings.r2_api, account=account, parent=keys.access_key, token=token, life_s=settings.life_s,
            now=settings.now,
        )  # fmt: skip
    if endpoint and not settings.sts_endpoint:
        return f"no STS is known at {endpoint}; set grants.sts_endpoint if it has one"
    if settings.role_arn is None and (keys is None or keys.session_token):
        return "only keys of an IAM user can be federated; set grants.role_arn"
    region = options.get("aws_region") or options.get("aws_default_region") or "us-east-1"
    return sts.StsIssuer(
        endpoint=settings.sts_endpoint or sts.endpoint_of(region), region=region, role_arn=settings.role_arn,
        keys=keys, life_s=settings.life_s, now=settings.now,
    )  # fmt: skip


def _azure(options: Mapping[str, str], settings: GrantSettings) -> Issuer | str:
    account, key = options.get("azure_storage_account_name"), options.get("azure_storage_account_key")
    if not account or not key:
        return "signatures are made with the account's key; set AZURE_STORAGE_ACCOUNT_KEY"
    endpoint = next((value for name, value in options.items() if "endpoint" in name), "")
    protocol = "https,http" if urlsplit(endpoint).scheme == "http" else "https"
    return azure.AzureIssuer(account=account, key=key, life_s=settings.life_s, protocol=protocol, now=settings.now)


def unscoped_warning(url: str, issuer: Issuer | str) -> str | None:
    """What `doctor` says of a store that cannot scope what it hands out; None for one that can, or needs not."""
    if scheme_of(url) in ("file", "memory"):
        return None
    if isinstance(issuer, str):
        return (
            f"blobs {url}: every instance gets the daemon's own credentials, so community hosts are refused: {issuer}; "
            f"{ADVICE}"
        )
    if issuer.scoped:
        return None
    return (
        f"blobs {url}: every instance gets credentials for the whole container, so community hosts are refused: Azure "
        f"cannot sign for several prefixes at once; {ADVICE}"
    )
