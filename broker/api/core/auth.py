"""Bearer tokens `gb_<id>_<secret>` with scopes: stored as hashes, and cached so that most requests need no query."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from broker.api.core.problems import RateLimited
from broker.api.core.readiness import answer_within
from broker.domain.errors import GpubrokerError, StoreUnavailable
from broker.domain.ids import base32
from broker.domain.tenancy import Scope, Tenant
from broker.ports import Clock, Store, Token
from broker.runtime.token_bucket import Bucket, TokenBucketRate, take

FORM = re.compile(r"Bearer (gb_[a-z2-7]{8}_[a-z2-7]{32})", re.IGNORECASE)
CACHE_S = 5.0
"""Seconds for which a cached token is valid for a new call."""
STREAM_CACHE_S = 2.0
"""Seconds for which a cached token is valid for an open stream, so that a stream of a deleted token ends within 5 s."""
NO_TOKEN = "give a valid token: Authorization: Bearer gb_..."
CACHED = 4096
"""Largest number of cached tokens, and of rate-limit buckets."""


class Unauthenticated(GpubrokerError):
    """No valid token was given. The message never says which part is wrong."""


class Forbidden(GpubrokerError):
    """The token is valid but lacks a scope."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Team, owner and scopes of the token that came with a request."""

    team: str
    owner: str
    scopes: frozenset[str]
    token_id: str
    expires_at: datetime | None = None
    """Expiry of the caller's token; None: it never expires."""

    @property
    def admin(self) -> bool:
        return "admin" in self.scopes

    @property
    def tenant(self) -> Tenant:
        """Identity for the store's row-level checks."""
        return Tenant(team=self.team, owner=self.owner, token_id=self.token_id, operator=self.admin)


def mint(entropy: Callable[[int], bytes]) -> tuple[str, str]:
    """Return (id, token) with 160 random bits in the secret."""
    token_id = base32(entropy(5), 8)
    return token_id, f"gb_{token_id}_{base32(entropy(20), 32)}"


def hashed(token: str) -> str:
    """Return the stored form of a token. A plain hash suffices, because the secret is random and not a password."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class TokenDigest:
    """Stored form of a token, which a sealed session cookie carries. No request header can name one."""

    sha256: str


Credential = str | TokenDigest | None
"""An Authorization header, or the token of a browser's session; None: neither was given."""


class Authenticator:
    """Authenticates callers of HTTP and gRPC. `rate` limits the calls of each token; None: no limit.

    A token that another broker deleted stays valid here for at most `CACHE_S`.
    """

    def __init__(self, store: Store, clock: Clock, rate: TokenBucketRate | None = None) -> None:
        self._store = store
        self._clock = clock
        self._rate = rate
        self._cache: OrderedDict[str, tuple[float, Token]] = OrderedDict()
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    async def caller(self, authorization: Credential, scope: Scope) -> Caller:
        """Return the caller of a token. Raises Unauthenticated, RateLimited, Forbidden, StoreUnavailable."""
        token = await self._valid(authorization)
        self._admit(token.id)
        caller = _caller(token)
        if scope not in caller.scopes and not caller.admin:
            raise Forbidden(f"this token lacks the scope {scope!r}; use one that has it")
        return caller

    async def has_scope(self, authorization: Credential, scope: Scope, *, within_s: float) -> bool:
        """Return True if the token has the scope.

        If the database does not answer in time, a token counts that was valid when it was last used.
        """
        try:
            await answer_within(within_s, self.caller(authorization, scope))
        except (TimeoutError, StoreUnavailable):
            digest = _digest(authorization)
            cached = None if digest is None else self._cache.get(digest)
            return cached is not None and bool({scope, "admin"} & set(cached[1].scopes))
        except GpubrokerError:
            return False
        return True

    async def recheck(self, authorization: Credential) -> None:
        """Check the token of an open stream again. Raises Unauthenticated if it has expired or was deleted."""
        await self._valid(authorization, STREAM_CACHE_S)

    async def _valid(self, authorization: Credential, age_s: float = CACHE_S) -> Token:
        digest = _digest(authorization)
        token = None if digest is None else await self._stored_token(digest, age_s)
        if token is None or (token.expires_at is not None and token.expires_at <= self._clock.now()):
            raise Unauthenticated(NO_TOKEN)
        return token

    async def _stored_token(self, digest: str, age_s: float) -> Token | None:
        now = self._clock.monotonic()
        cached = self._cache.get(digest)
        if cached is not None and now - cached[0] < age_s:
            return cached[1]
        token = await self._store.token(digest)
        if token is None:
            self._cache.pop(digest, None)
            return None
        self._cache[digest] = (now, token)
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return token

    def _admit(self, token_id: str) -> None:
        """Raise RateLimited if the token calls too often."""
        if self._rate is None:
            return
        self._buckets[token_id], wait_s = take(self._buckets.get(token_id), self._rate, self._clock.monotonic())
        self._buckets.move_to_end(token_id)
        while len(self._buckets) > CACHED:
            self._buckets.popitem(last=False)
        if wait_s:
            raise RateLimited(f"this token calls more than {self._rate.per_s:g} times a second; slow down", wait_s)

    def forget(self) -> None:
        """Clear the cache after this process deleted a token, so that the token is refused at once."""
        self._cache.clear()


def token_digest(authorization: Credential) -> TokenDigest:
    """Return the stored form of a token. Raises Unauthenticated if the header holds none."""
    digest = _digest(authorization)
    if digest is None:
        raise Unauthenticated(NO_TOKEN)
    return TokenDigest(digest)


def _digest(credential: Credential) -> str | None:
    if isinstance(credential, TokenDigest):
        return credential.sha256
    match = FORM.fullmatch(credential or "")
    return hashed(match[1]) if match else None


def _caller(token: Token) -> Caller:
    return Caller(
        team=token.team,
        owner=token.owner,
        scopes=frozenset(token.scopes),
        token_id=token.id,
        expires_at=token.expires_at,
    )
