"""Cloudflare R2: temporary access credentials for prefixes and objects of one bucket.

A set of credentials has one permission for all its paths, so an attempt gets two sets. One reads its inputs, the other
writes its own objects. See https://developers.cloudflare.com/r2/api/s3/temporary-credentials/
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from broker.blobs.credentials.base import Issued, post, refused
from broker.blobs.credentials.scope import Scope
from trainer.contract.documents import READER

API = "https://api.cloudflare.com/client/v4"
HOST = ".r2.cloudflarestorage.com"
TOKEN_VARIABLE = "CLOUDFLARE_API_TOKEN"
MAX_S = 604_800
FIX = "give the API token of CLOUDFLARE_API_TOKEN the permission to edit R2 storage"


@dataclass(frozen=True, kw_only=True)
class R2Issuer:
    """Issuer by Cloudflare's API. `parent`: access key id of the daemon's own R2 keys, whose rights are the maximum."""

    api: str
    account: str
    parent: str
    token: str = field(repr=False)
    life_s: int
    now: Callable[[], datetime]

    @property
    def scoped(self) -> bool:
        return True

    async def issue(self, scope: Scope) -> Issued:
        life_s = min(MAX_S, self.life_s)
        expires_at = self.now() + timedelta(seconds=life_s)
        reader, writer = await asyncio.gather(
            self._credentials_for(scope, "object-read-only", scope.read_prefixes, scope.read_objects, life_s),
            self._credentials_for(scope, "object-read-write", scope.write_prefixes, scope.write_objects, life_s),
        )
        return Issued(options=writer | {READER + key: value for key, value in reader.items()}, expires_at=expires_at)

    async def _credentials_for(
        self,
        scope: Scope,
        permission: Literal["object-read-only", "object-read-write"],
        prefixes: Sequence[str],
        objects: Sequence[str],
        life_s: int,
    ) -> dict[str, str]:
        url = f"{self.api}/accounts/{self.account}/r2/temp-access-credentials"
        parameters = {
            "bucket": scope.bucket, "parentAccessKeyId": self.parent, "permission": permission, "ttlSeconds": life_s,
            "prefixes": list(prefixes), "objects": list(objects),
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        status, answer = await post("Cloudflare", url, headers=headers, body=json.dumps(parameters).encode())
        try:
            document: Any = json.loads(answer)
            if status != 200 or not document.get("success"):
                raise refused("Cloudflare", f"{status} {_errors(document)}", FIX)
            result = document["result"]
            return {
                "aws_access_key_id": result["accessKeyId"],
                "aws_secret_access_key": result["secretAccessKey"],
                "aws_session_token": result["sessionToken"],
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refused("Cloudflare", f"{status} with an answer that is not what is documented") from None


def _errors(document: Any) -> str:
    return ", ".join(f"{e.get('code')} {e.get('message')}" for e in document.get("errors") or [])


def account_of(endpoint: str | None) -> str | None:
    """Return the account of `https://<account>[.eu|.fedramp].r2.cloudflarestorage.com`; None for other endpoints."""
    host = (endpoint or "").removeprefix("https://").split("/", 1)[0]
    return host.split(".", 1)[0] if host.endswith(HOST) else None
