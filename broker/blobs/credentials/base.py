"""Interface of issuers, which create credentials for one attempt, and the parser of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import aiohttp

from broker.blobs.credentials.scope import Scope
from broker.domain.errors import BlobsUnavailable

CALL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Issued:
    options: Mapping[str, str] = field(repr=False)
    """Over the store's own options, from which the daemon's credentials are taken out."""
    expires_at: datetime


class Issuer(Protocol):
    """Makes credentials that reach a scope and end by themselves."""

    @property
    def scoped(self) -> bool:
        """True when they reach the attempt's own part only."""
        ...

    async def issue(self, scope: Scope) -> Issued:
        """Raises BlobsUnavailable saying who refused and what to do."""
        ...


async def post(who: str, url: str, *, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    """Status and body of one POST. Raises BlobsUnavailable when there was no answer."""
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            return answer.status, await answer.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as e:
        raise refused(who, f"{type(e).__name__} {e}".rstrip()) from None


def refused(who: str, why: str, fix: str = "") -> BlobsUnavailable:
    """One line; `why` is what the service said, which holds no secret of ours."""
    return BlobsUnavailable(
        f"{who}: no credentials for the attempt: {' '.join(why.split())[:300]}" + (fix and f"; {fix}")
    )
