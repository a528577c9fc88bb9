"""Interface of issuers, which create credentials for one attempt, and the HTTP call and the error that they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import aiohttp

from broker.blobs.credentials.scope import Scope
from broker.domain.errors import BlobsUnavailable

CALL_S = 10.0
"""Timeout of one HTTP call in seconds."""


@dataclass(frozen=True, kw_only=True)
class Issued:
    """Credentials of one attempt."""

    options: Mapping[str, str] = field(repr=False)
    """Options that replace the daemon's credentials; they are added to the other options of the store."""
    expires_at: datetime


class Issuer(Protocol):
    """Issuer of credentials that are limited to a scope and expire."""

    @property
    def scoped(self) -> bool:
        """True if the credentials reach only the attempt's own objects."""
        ...

    async def issue(self, scope: Scope) -> Issued:
        """Return credentials for the scope. Raises BlobsUnavailable, whose message names the service and the fix."""
        ...


async def post(service: str, url: str, *, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    """Send one POST and return (status, body). Raises BlobsUnavailable if there is no answer."""
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            return answer.status, await answer.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as e:
        raise refused(service, f"{type(e).__name__} {e}".rstrip()) from None


def refused(service: str, why: str, fix: str = "") -> BlobsUnavailable:
    """Return the error in one line. `service`: its name; `why`: its message, which must contain no secret."""
    return BlobsUnavailable(
        f"{service}: no credentials for the attempt: {' '.join(why.split())[:300]}" + (fix and f"; {fix}")
    )
