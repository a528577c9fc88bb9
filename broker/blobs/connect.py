"""Opens blob stores by URL with obstore, and holds the list prices of their storage."""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from broker.domain.blob_url import bad_url, scheme_of
from broker.domain.errors import InvalidInput
from broker.runtime.private_files import private_folder

CALL_S = 20.0
"""Longest wait in seconds for one call, retries included."""

S3, R2, GCS, AZURE = Decimal("0.023"), Decimal("0.015"), Decimal("0.020"), Decimal("0.018")
"""List prices of a GiB-month of ordinary storage in dollars, checked 2026-11; an operator may override them.

S3 Standard $0.023 (us-east-1, first 50 TB), Cloudflare R2 $0.015, Google Cloud Storage Standard $0.020 (us regions),
Azure Blob hot LRS $0.018. Other S3 services are priced as S3. Sources: docs/design/money.md.
"""
R2_HOST = ".r2.cloudflarestorage.com"

_ENVIRONMENT = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID",
    ),
}  # fmt: skip
_ALIASES = {
    "endpoint": "aws_endpoint", "endpoint_url": "aws_endpoint", "aws_endpoint_url": "aws_endpoint",
    "aws_endpoint_url_s3": "aws_endpoint", "region": "aws_region",
}  # fmt: skip
"""Canonical name of each S3 setting, by alternative name. obstore refuses two names of one setting."""
_HTTP_SETTING = re.compile(
    r"(aws_|google_|azure_)?(allow_http|allow_invalid_certificates|\w*timeout|default_content_type|http[12]_\w+"
    r"|pool_\w+|proxy_\w+|user_agent)"
)
"""Options that `connect` refuses. obstore panics on them, and no `except Exception` catches a panic."""


def folder_of(url: str) -> Path | None:
    """Return the folder of a file:// URL; None for any other URL. Raises InvalidInput like `scheme_of`."""
    return Path(unquote(urlsplit(url).path)) if scheme_of(url) == "file" else None


def options_of(url: str, options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the settings for obstore, with keys in lower case. `options` override the environment variables.

    The environment variables are copied into the result, because a machine that receives these options does not have
    the broker's environment.
    """
    scheme = scheme_of(url)
    names = _ENVIRONMENT.get(scheme, ())
    aliases = _ALIASES if scheme == "s3" else {}
    settings = [(name, os.environ[name]) for name in names if os.environ.get(name)] + [*(options or {}).items()]
    return {aliases.get(key.lower(), key.lower()): value for key, value in settings}


def connect(url: str, options: Mapping[str, str]) -> ObjectStore:
    """Return a store whose paths are relative to `url`. Raises InvalidInput if the store cannot be opened."""
    scheme = scheme_of(url)
    if unfit := next((key for key in options if _HTTP_SETTING.fullmatch(key)), None):
        raise InvalidInput(bad_url(url, f"option {unfit!r}: leave it out; plain http follows from an http:// endpoint"))
    try:
        if (folder := folder_of(url)) is not None:
            private_folder(folder)
            # Empty folders are removed, because a LIST of `heartbeats/` would otherwise visit all past attempts.
            return from_url(folder.as_uri(), automatic_cleanup=True)
        if scheme == "memory":
            return from_url(url)
        config: Any = dict(options)
        endpoint = next((v for k, v in options.items() if "endpoint" in k or "base_url" in k), "")
        return from_url(
            url,
            config=config,
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": timedelta(seconds=CALL_S)},
            retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=CALL_S)},
        )
    except (BaseError, OSError, ValueError) as e:
        raise InvalidInput(bad_url(url, one_line(e))) from None


def one_line(error: BaseException) -> str:
    """Return obstore's message in one line, without its debug dump, in at most 300 characters."""
    text = str(error).split("\n\nDebug source", 1)[0]
    return " ".join(text.split())[:300] or type(error).__name__


def storage_usd_per_gib_month(url: str, options: Mapping[str, str]) -> Decimal:
    """Return the list price of the store; 0 for a folder, which is on the operator's own disk."""
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        return R2 if any(R2_HOST in value.lower() for value in options.values()) else S3
    return {"gs": GCS, "az": AZURE}.get(scheme, Decimal(0))
