"""Azure: a shared access signature for the container, made with the account's key.

The signature cannot be limited to an attempt. It covers the account, one container, one directory or one blob, and an
attempt's objects are in several directories. Its benefits: no machine has the account's key, and it expires.
https://learn.microsoft.com/rest/api/storageservices/create-service-sas, version 2020-12-06 and later.
"""

import base64
import binascii
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from broker.blobs.credentials.base import Issued, refused
from broker.blobs.credentials.scope import Scope

VERSION = "2022-11-02"
PERMISSIONS = "rwdl"


@dataclass(frozen=True, kw_only=True)
class AzureIssuer:
    """Issuer that computes signatures locally, without a request to Azure."""

    account: str
    key: str = field(repr=False)
    life_s: int
    protocol: str
    """`https`, or `https,http` for an emulator."""
    now: Callable[[], datetime]

    @property
    def scoped(self) -> bool:
        return False

    async def issue(self, scope: Scope) -> Issued:
        expires_at = (self.now() + timedelta(seconds=self.life_s)).replace(microsecond=0)
        token = container_signature(self.account, self.key, scope.bucket, expires_at, self.protocol)
        return Issued(options={"azure_storage_sas_token": token}, expires_at=expires_at)


def container_signature(account: str, key: str, container: str, expires_at: datetime, protocol: str) -> str:
    """Return the query string with the signature. Raises BlobsUnavailable if the key is not base64."""
    ends = expires_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    resource = f"/blob/{account}/{container}"
    # Permissions, start, expiry, resource, identifier, address, protocol, version, kind. The last seven lines are
    # empty: snapshot, encryption scope and five response headers.
    to_sign = "\n".join([PERMISSIONS, "", ends, resource, "", "", protocol, VERSION, "c", *[""] * 7])
    try:
        secret = base64.b64decode(key, validate=True)
    except binascii.Error:
        raise refused("Azure", "the account's key is not base64", "copy AZURE_STORAGE_ACCOUNT_KEY again") from None
    signature = base64.b64encode(hmac.digest(secret, to_sign.encode(), "sha256")).decode()
    return urlencode({"sv": VERSION, "sr": "c", "sp": PERMISSIONS, "se": ends, "spr": protocol, "sig": signature})
