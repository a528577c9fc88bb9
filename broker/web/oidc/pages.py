"""Start and end of a sign-in by OpenID Connect. A sealed cookie binds both to one browser."""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlencode

from aiohttp import web
from cryptography.fernet import Fernet, InvalidToken
from pydantic import TypeAdapter, ValidationError

from broker.api.core.auth import Caller, TokenDigest, hashed
from broker.api.core.problems import Overloaded, drop_tracebacks
from broker.api.core.sessions import SESSION_S
from broker.api.core.status_codes import answer_to, public_text
from broker.api.http.context import ACTIONS, SERVICE, SESSIONS
from broker.api.service.tenancy import NewToken
from broker.domain.errors import GpubrokerError
from broker.domain.spec import Name
from broker.domain.tenancy import Scope
from broker.web.browser import SIGN_IN, cookie_name, is_loopback, own_path, redirect_to, set_session
from broker.web.oidc.config import OidcConfig
from broker.web.oidc.id_token import Claims, OidcRefused, check_claims
from broker.web.oidc.provider import OidcProvider
from broker.web.rendering import rendered

START = f"{SIGN_IN}/oidc"
CALLBACK = f"{START}/callback"
FLOW_S = 600
"""Seconds from the start of a sign-in to its end."""
AT_ONCE = 16
"""Most sign-ins that wait for the provider at once."""
OWNER: TypeAdapter[str] = TypeAdapter(Name)
OTHER = re.compile(r"[^a-z0-9]+")
"""Characters that an owner's name cannot have."""
ERROR_CODE = re.compile(r"[a-z_]{1,40}")


class OidcSignIn:
    """Sign-in by one provider."""

    def __init__(self, app: web.Application, config: OidcConfig) -> None:
        service = app[SERVICE]
        self.config = config
        self.provider = OidcProvider(config, service.clock)
        self.redirect_uri = config.public_url.rstrip("/") + CALLBACK
        key = hashlib.sha256(b"gpubroker oidc" + service.box.session_key()).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(key))
        self._service = service
        self._running = 0
        self._used: set[str] = set()
        """States of sign-ins that are being completed here."""

    async def start(self, request: web.Request) -> web.Response:
        """Send the browser to the provider."""
        random = self._service.entropy
        state, nonce, verifier = (_text(random(32)) for _ in range(3))
        target = own_path(request.query.get("next"))
        flow = {"state": state, "nonce": nonce, "verifier": verifier, "next": target}
        query = {
            "response_type": "code",
            "client_id": self.config.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": " ".join(self.config.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": _text(hashlib.sha256(verifier.encode()).digest()),
            "code_challenge_method": "S256",
        }
        try:
            with _Slot(self):
                endpoint = await self.provider.endpoint("authorization_endpoint")
        except GpubrokerError as error:
            return _refusal(request, error)
        response = redirect_to(f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}")
        sealed = self._fernet.encrypt_at_time(json.dumps(flow).encode(), int(self._service.clock.now().timestamp()))
        # Strict would keep the cookie from the provider's redirect back.
        response.set_cookie(
            _flow_cookie(request), sealed.decode(), max_age=FLOW_S, path="/", httponly=True, samesite="Lax",
            secure=not is_loopback(request),
        )  # fmt: skip
        return response

    async def finish(self, request: web.Request) -> web.Response:
        """Start a session for the user of the provider's id_token."""
        try:
            with _Slot(self):
                flow = await self._flow(request)
                response = redirect_to(own_path(flow["next"]))
                token = await request.app[ACTIONS].run(self._token(request.query, flow))
                set_session(request, response, request.app[SESSIONS].start(token))
        except GpubrokerError as error:
            response = _refusal(request, error)
        response.del_cookie(_flow_cookie(request), path="/", secure=not is_loopback(request), httponly=True)
        return response

    async def _flow(self, request: web.Request) -> Mapping[str, str]:
        """Return the values that this browser started with, once. Raises OidcRefused, StoreUnavailable."""
        stale = OidcRefused("this sign-in was used, has expired or began in another browser; sign in again")
        now_s = int(self._service.clock.now().timestamp())
        try:
            sealed = request.cookies.get(_flow_cookie(request), "").encode()
            flow: dict[str, str] = json.loads(self._fernet.decrypt_at_time(sealed, FLOW_S, now_s))
        except (InvalidToken, ValueError):
            raise stale from None
        state = flow["state"]
        if not hmac.compare_digest(state.encode(), request.query.get("state", "").encode()) or state in self._used:
            raise stale
        self._used.add(state)
        try:
            if await self._service.store.is_session_ended(state[:32]):
                raise stale
            await self._service.store.end_session(state[:32], for_s=FLOW_S + 60)
        finally:
            self._used.discard(state)
        return flow

    async def _token(self, query: Mapping[str, str], flow: Mapping[str, str]) -> TokenDigest:
        """Create the token of the session. Its text is dropped, so it serves this session alone."""
        code, error = query.get("code"), query.get("error")
        if error is not None or not code or len(code) > 4096:
            shown = error if error is not None and ERROR_CODE.fullmatch(error) else "no code"
            raise OidcRefused(f"the provider refused: {shown}; sign in again")
        if query.get("iss", self.config.issuer) != self.config.issuer:  # RFC 9207
            raise OidcRefused("the answer is of another issuer; correct oidc.issuer")
        claims = await self.provider.claims(code, flow["verifier"], self.redirect_uri)
        now = self._service.clock.now()
        check_claims(
            claims, issuer=self.config.issuer, client_id=self.config.client_id, nonce=flow["nonce"],
            now_s=now.timestamp(),
        )  # fmt: skip
        owner, (team, scopes) = _owner(claims, self.config), _granted(claims, self.config)
        # The audit names the user as the actor; the configuration grants what the token may do.
        caller = Caller(team=team, owner=owner, scopes=frozenset({"admin"}), token_id="")
        until = now + timedelta(seconds=SESSION_S)
        wish = NewToken(team=team, owner=owner, scopes=scopes, expires_at=until, note="sign-in by OpenID Connect")
        _, text = await self._service.tenancy.create_token(caller, wish)
        return TokenDigest(hashed(text))


OIDC: web.AppKey[OidcSignIn] = web.AppKey("oidc", OidcSignIn)


class _Slot:
    """Place among the sign-ins that wait for the provider. Raises Overloaded."""

    def __init__(self, sign_in: OidcSignIn) -> None:
        self._sign_in = sign_in

    def __enter__(self) -> None:
        if self._sign_in._running >= AT_ONCE:
            raise Overloaded(f"{AT_ONCE} sign-ins wait for the provider already; try again")
        self._sign_in._running += 1

    def __exit__(self, *_: object) -> None:
        self._sign_in._running -= 1


def _owner(claims: Claims, config: OidcConfig) -> str:
    if config.owner_claim == "email" and claims.get("email_verified") is not True:
        raise OidcRefused("the provider has not verified your email; verify it there")
    name = claims.get(config.owner_claim)
    if not isinstance(name, str) or not name.strip() or len(name) > 255:
        raise OidcRefused(f"the claim {config.owner_claim} is no name; choose another oidc.owner_claim")
    try:
        return OWNER.validate_python(name)
    except ValidationError:  # the digest keeps two users apart whose names differ in other characters only
        digest = hashlib.sha256(f"{config.issuer}\0{name}".encode(errors="replace")).hexdigest()[:16]
        return f"{OTHER.sub('-', name.lower())[:40].strip('-') or 'user'}-{digest}"


def _granted(claims: Claims, config: OidcConfig) -> tuple[str, tuple[Scope, ...]]:
    """Return (team, scopes) of the user's groups."""
    groups = claims.get(config.groups_claim)
    listed = set(filter(lambda group: isinstance(group, str), groups)) if isinstance(groups, list) else set()
    own = [group for name, group in config.groups.items() if name in listed]
    if not own:
        raise OidcRefused("none of your groups has a team; ask an operator to add it to oidc.groups")
    team = own[0].team
    scopes: dict[Scope, None] = {scope: None for group in own if group.team == team for scope in group.scopes}
    return team, tuple(scopes)


def _flow_cookie(request: web.Request) -> str:
    return f"{cookie_name(request)}-oidc"


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _refusal(request: web.Request, error: GpubrokerError) -> web.Response:
    """Return the sign-in page with the reason; the address, which holds a code, is not repeated."""
    now = request.app[SERVICE].clock.now()
    drop_tracebacks(error)
    values = {"next": "/ui/jobs", "error": public_text(error), "here": SIGN_IN, "oidc": START}
    return rendered(request, "sign_in.html", now, answer_to(error).http, **values)
