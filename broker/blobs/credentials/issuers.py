"""Choice of the credential issuer of a blob store, or the reason why it has none."""

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
"""Settings of encryption, which contain names of keys but no keys."""
ADVICE = "see docs/guide/images-and-storage.md"


@dataclass(frozen=True, kw_only=True)
class GrantSettings:
    """Settings of the credentials of attempts."""

    scope: bool = True
    """False: attempts get the daemon's own credentials."""
    life_s: int = 3600
    """Lifetime in seconds, limited to the range that the cloud allows."""
    role_arn: str | None = None
    """ARN of the role that is assumed for an attempt; None: the keys of an IAM user are federated."""
    sts_endpoint: str | None = None
    """URL of the STS of an S3 service other than AWS; None: the STS of AWS."""
    r2_api: str = r2.API
    google_exchange: str = gcs.EXCHANGE
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


def issuer_of(url: str, options: Mapping[str, str], settings: GrantSettings) -> Issuer | str:
    """Return the issuer of this store, or the reason why it has none, as the end of a sentence."""
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
    """Return the options that a machine needs in addition to its credentials, such as endpoint and region.

    An option that may be a credential is left out.
    """
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
    """Return the warning of `doctor` for a store that cannot scope credentials; None: it can, or has none."""
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
