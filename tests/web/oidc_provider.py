"""Provider of OpenID Connect on loopback: discovery, authorization codes with PKCE, signed id_tokens, keys."""

import base64
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

CLIENT = "gpubroker"
SECRET = "client-secret-of-the-test"


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def number(value: int) -> str:
    return encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))


@dataclass
class SigningKey:
    kid: str
    private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

    def public(self) -> dict[str, str]:
        if isinstance(self.private, rsa.RSAPrivateKey):
            rsa_numbers = self.private.public_key().public_numbers()
            return {"kty": "RSA", "kid": self.kid, "n": number(rsa_numbers.n), "e": number(rsa_numbers.e)}
        point = self.private.public_key().public_numbers()
        x, y = (encoded(value.to_bytes(32, "big")) for value in (point.x, point.y))
        return {"kty": "EC", "crv": "P-256", "kid": self.kid, "x": x, "y": y}

    def signed(self, claims: dict[str, Any], **head: Any) -> str:
        algorithm = "RS256" if isinstance(self.private, rsa.RSAPrivateKey) else "ES256"
        header = {"alg": algorithm, "kid": self.kid} | head
        content = ".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
        if isinstance(self.private, rsa.RSAPrivateKey):
            signature = self.private.sign(content.encode(), padding.PKCS1v15(), SHA256())
        else:
            r, s = decode_dss_signature(self.private.sign(content.encode(), ec.ECDSA(SHA256())))
            signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")
        return f"{content}.{encoded(signature)}"


def new_key(kid: str, *, is_rsa: bool = True) -> SigningKey:
    private = rsa.generate_private_key(65537, 2048) if is_rsa else ec.generate_private_key(ec.SECP256R1())
    return SigningKey(kid, private)


@dataclass
class LoopbackProvider:
    """Provider that follows the specification, except for what a test changes."""

    issuer: str = ""
    key: SigningKey = field(default_factory=lambda: new_key("first"))
    published: list[SigningKey] | None = None
    """Keys that are published; None: the signing key."""
    claims: dict[str, Any] = field(default_factory=dict)
    """Changed claims."""
    head: dict[str, Any] = field(default_factory=dict)
    discovery: dict[str, Any] = field(default_factory=dict)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    async def document(self, _: web.Request) -> web.Response:
        paths = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks"}
        ends = {name: f"{self.issuer}/{path}" for name, path in paths.items()}
        return web.json_response({"issuer": self.issuer} | ends | self.discovery)

    async def jwks(self, _: web.Request) -> web.Response:
        return web.json_response({"keys": [key.public() for key in self.published or [self.key]]})

    async def authorize(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        assert query["client_id"] == CLIENT
        code = secrets.token_urlsafe(16)
        self.codes[code] = query
        raise web.HTTPFound(f"{query['redirect_uri']}?code={code}&state={query['state']}")

    async def token(self, request: web.Request) -> web.Response:
        form = await request.post()
        asked = self.codes.pop(str(form["code"]), None)
        challenge = encoded(hashlib.sha256(str(form["code_verifier"]).encode()).digest())
        right = asked is not None and (asked["code_challenge"], asked["redirect_uri"]) == (
            challenge,
            form["redirect_uri"],
        )
        if asked is None or not right or form["client_secret"] != SECRET or form["grant_type"] != "authorization_code":
            return web.json_response({"error": "invalid_grant"}, status=400)
        now = time.time()
        claims = {
            "iss": self.issuer, "aud": CLIENT, "sub": "grace", "exp": now + 300, "iat": now, "nonce": asked["nonce"],
            "groups": ["ml"],
        }  # fmt: skip
        token = self.key.signed(claims | self.claims, **self.head)
        return web.json_response({"access_token": "a", "token_type": "Bearer", "id_token": token})


@asynccontextmanager
async def provider_on_loopback() -> AsyncIterator[LoopbackProvider]:
    provider = LoopbackProvider()
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", provider.document)
    app.router.add_get("/authorize", provider.authorize)
    app.router.add_get("/jwks", provider.jwks)
    app.router.add_post("/token", provider.token)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider.issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield provider
    finally:
        await runner.cleanup()
