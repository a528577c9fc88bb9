"""Google Cloud Storage: exchanges the daemon's access token for a token with a Credential Access Boundary.

https://cloud.google.com/iam/docs/downscoping-short-lived-credentials; the bucket needs uniform bucket-level access.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from broker.blobs.credentials.base import Issued, post, refused
from broker.blobs.credentials.scope import Scope

EXCHANGE = "https://sts.googleapis.com/v1/token"
TOKEN_URI = "https://oauth2.googleapis.com/token"
STORAGE = "https://www.googleapis.com/auth/devstorage.read_write"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
ASSERTION_S = 3600
"""Lifetime in seconds of a service account's token; an exchanged token is valid no longer."""
FIX = "give the service account access to the bucket, and enable the Security Token Service API"


@dataclass(frozen=True, kw_only=True)
class GcsIssuer:
    """Issuer by Google's STS. `account`: the decoded key file of the service account."""

    account: Mapping[str, str] = field(repr=False)
    exchange: str
    now: Callable[[], datetime]

    @property
    def scoped(self) -> bool:
        return True

    async def issue(self, scope: Scope) -> Issued:
        began = self.now()
        own = await self._own_token(began)
        parameters = {
            "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
            "requested_token_type": ACCESS_TOKEN,
            "subject_token_type": ACCESS_TOKEN,
            "subject_token": own["access_token"],
            "options": json.dumps({"accessBoundary": {"accessBoundaryRules": boundary(scope)}}),
        }
        token = await _token(self.exchange, parameters)
        # The answer may lack `expires_in`; the token then lives as long as the service account's token.
        life = timedelta(seconds=float(token.get("expires_in") or own.get("expires_in") or ASSERTION_S))
        return Issued(options={"google_bearer_token": token["access_token"]}, expires_at=began + life)

    async def _own_token(self, now: datetime) -> dict[str, Any]:
        """Return the service account's access token, in exchange for a signed assertion (RFC 7523)."""
        uri = self.account.get("token_uri", TOKEN_URI)
        begun = int(now.timestamp())
        claims = {
            "iss": self.account["client_email"], "scope": STORAGE, "aud": uri, "iat": begun, "exp": begun + ASSERTION_S,
        }  # fmt: skip
        header = {"alg": "RS256", "typ": "JWT", "kid": self.account.get("private_key_id", "")}
        unsigned = b".".join(_url64(json.dumps(part).encode()) for part in (header, claims))
        key = load_pem_private_key(self.account["private_key"].encode(), None)
        assert isinstance(key, RSAPrivateKey)
        assertion = unsigned + b"." + _url64(key.sign(unsigned, PKCS1v15(), SHA256()))
        grant = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion.decode()}
        return await _token(uri, grant)


def boundary(scope: Scope) -> list[dict[str, object]]:
    """Return the rules of the boundary; Google allows at most ten.

    The attempt's own prefixes need the role objectUser, because overwriting an object counts as deleting it.
    """
    resource = f"projects/_/buckets/{scope.bucket}"

    def starts(prefix: str) -> str:
        return f"resource.name.startsWith('{resource}/objects/{prefix}')"

    def exactly(key: str) -> str:
        return f"resource.name == '{resource}/objects/{key}'"

    def lists(prefix: str) -> str:
        return f"api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('{prefix}')"

    def rule(role: str, *conditions: str) -> dict[str, object]:
        return {
            "availableResource": f"//storage.googleapis.com/{resource}",
            "availablePermissions": [f"inRole:roles/storage.{role}"],
            "availabilityCondition": {"expression": " || ".join(conditions)},
        }

    return [
        rule(
            "objectViewer",
            *map(starts, scope.read_prefixes),
            *map(exactly, scope.read_objects),
            *map(lists, scope.list_prefixes),
        ),
        rule("objectUser", *map(starts, scope.write_prefixes)),
        rule("objectCreator", *map(exactly, scope.write_objects)),
    ]


def service_account(options: Mapping[str, str]) -> dict[str, str] | None:
    """Return the service account's key that a store's options name; None: they name no readable key."""
    text = options.get("google_service_account_key")
    if not text:
        named = ("google_service_account", "google_service_account_path", "google_application_credentials")
        path = next((options[name] for name in named if options.get(name)), None)
        try:
            text = Path(path).read_text() if path else ""
        except OSError:
            return None
    try:
        document = json.loads(text)
    except ValueError:
        return None
    required = ("client_email", "private_key")
    if not isinstance(document, dict):
        return None
    return document if all(isinstance(document.get(name), str) for name in required) else None


async def _token(url: str, form: Mapping[str, str]) -> dict[str, Any]:
    status, answer = await post("Google", url, headers=FORM, body=urlencode(form).encode())
    try:
        document = json.loads(answer)
        if status == 200 and document["access_token"]:
            return dict(document)
        why = f"{status} {document.get('error', '')} {document.get('error_description', '')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        why = f"{status} with an answer that is not what is documented"
    raise refused("Google", why, FIX)


def _url64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
