"""Calls to the OpenID Connect provider: discovery, keys and the exchange of a code. Answers are bounded and cached."""

import asyncio
import json
from collections.abc import Mapping, Sequence

import aiohttp

from broker.domain.errors import InvalidInput, Problem
from broker.ports import Clock
from broker.runtime.network.address_guard import NOT_PUBLIC, public_socket
from broker.web.oidc.config import OidcConfig, is_loopback_url, is_private
from broker.web.oidc.id_token import Claims, OidcRefused, UnknownKey, verified

ANSWER_BYTES = 256 * 1024
CALL_S = 10.0
WAIT_S = 15.0
"""Most seconds for a document, including the wait for the fetch of another sign-in."""
NO_ANSWER = "the provider does not answer; try again, or sign in with a token"
CACHE_S = 3600.0
"""Seconds for which the discovery document and the keys are used."""
REFETCH_S = 10.0
"""Least seconds between two fetches of the keys, also for tokens with unknown keys."""
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class OidcProvider:
    """Client of one provider."""

    def __init__(self, config: OidcConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._secret = _secret(config)
        self._lock = asyncio.Lock()
        self._cached: dict[str, tuple[float, Claims]] = {}
        """Answer by address, with the monotonic time of its fetch."""

    async def endpoint(self, name: str) -> str:
        """Return an endpoint of the discovery document. Raises OidcRefused."""
        issuer = self._config.issuer
        document = await self._document(f"{issuer.rstrip('/')}/.well-known/openid-configuration", CACHE_S)
        if document.get("issuer") != issuer:
            raise OidcRefused("the provider names another issuer; correct oidc.issuer")
        url = document.get(name)
        if not isinstance(url, str) or not is_private(url) or (is_loopback_url(url) and not is_loopback_url(issuer)):
            raise OidcRefused(f"the provider has no safe {name}; check its discovery document")
        return url

    async def claims(self, code: str, verifier: str, redirect_uri: str) -> Claims:
        """Exchange a code for an id_token, and return its claims with a right signature. Raises OidcRefused."""
        config = self._config
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
            "client_id": config.client_id,
        } | ({} if self._secret is None else {"client_secret": self._secret})
        answer = await self._call("POST", await self.endpoint("token_endpoint"), fields)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise OidcRefused("the provider gave no id_token; allow the scope openid")
        address = await self.endpoint("jwks_uri")
        try:
            return verified(token, _keys(await self._document(address, CACHE_S)))
        except UnknownKey:  # the provider may have changed its keys
            return verified(token, _keys(await self._document(address, REFETCH_S)))

    async def _document(self, url: str, age_s: float) -> Claims:
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._cached_or_read(url, age_s)
        except TimeoutError:
            raise OidcRefused(NO_ANSWER) from None

    async def _cached_or_read(self, url: str, age_s: float) -> Claims:
        async with self._lock:
            cached = self._cached.get(url)
            if cached is not None and self._clock.monotonic() - cached[0] < age_s:
                return cached[1]
            answer = await self._call("GET", url, None)
            self._cached[url] = (self._clock.monotonic(), answer)
            return answer

    async def _call(self, method: str, url: str, fields: Mapping[str, str] | None) -> Claims:
        anywhere = self._config.private_address or is_loopback_url(self._config.issuer)
        connector = aiohttp.TCPConnector(socket_factory=None if anywhere else public_socket, force_close=True)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    timeout=aiohttp.ClientTimeout(total=CALL_S),
                    headers={"User-Agent": "gpubroker", "Accept": "application/json", "Accept-Encoding": "identity"},
                ) as http,
                http.request(method, url, data=fields, allow_redirects=False) as response,
            ):
                return _claims_of(response.status, await _bounded_body(response))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if NOT_PUBLIC in str(error):
                raise OidcRefused(
                    "the provider has a private address; set oidc.private_address if it is yours"
                ) from None
            raise OidcRefused(NO_ANSWER) from None


async def _bounded_body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(16_384):
        body += piece
        if len(body) > ANSWER_BYTES:
            raise OidcRefused("the provider's answer is too long; check oidc.issuer")
    return bytes(body)


def _claims_of(status: int, body: bytes) -> Claims:
    if status != 200:
        raise OidcRefused(f"the provider refused with status {status}; sign in again")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise OidcRefused("the provider's answer is not JSON; check oidc.issuer")
    return answer


def _keys(document: Claims) -> Sequence[Claims]:
    keys = document.get("keys")
    return [key for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []


def _secret(config: OidcConfig) -> str | None:
    """Return the client's secret; None: a public client. Raises InvalidInput."""
    path = config.client_secret_file
    if path is None:
        return None
    try:
        secret = path.read_text().strip()
    except (OSError, ValueError):
        secret = ""
    if not secret:
        message = f"{path} holds no secret that the daemon can read; write the client's secret there"
        raise InvalidInput(Problem(field="oidc.client_secret_file", message=message))
    return secret
