"""AWS Signature Version 4 of a POST with a form body, which is all that STS needs.

https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html
"""

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

ALGORITHM = "AWS4-HMAC-SHA256"
FORM = "application/x-www-form-urlencoded; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Keys:
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def signed_headers(url: str, body: bytes, keys: Keys, *, region: str, service: str, now: datetime) -> dict[str, str]:
    """Return the headers of the POST, Authorization among them. `url` has no query; its path is signed unchanged."""
    parts = urlsplit(url)
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = {"content-type": FORM, "host": parts.netloc, "x-amz-date": stamp}
    if keys.session_token:
        signed["x-amz-security-token"] = keys.session_token
    names = ";".join(sorted(signed))
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    request = "\n".join(["POST", parts.path or "/", "", lines, names, hashlib.sha256(body).hexdigest()])
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    to_sign = "\n".join([ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = b"AWS4" + keys.secret_key.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    del signed["host"]  # the client sends it
    credential = f"{ALGORITHM} Credential={keys.access_key}/{scope}"
    return signed | {"authorization": f"{credential}, SignedHeaders={names}, Signature={signature}"}
