"""Checks of an id_token: signature by a key of the provider, then its claims (OpenID Connect Core 3.1.3.7)."""

import base64
import hmac
import json
import math
from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from broker.api.core.auth import Unauthenticated

LEEWAY_S = 60
"""Seconds by which the clocks of the provider and the daemon may differ."""
TOKEN_BYTES = 32 * 1024
RSA_BITS = range(2048, 8193)
P256_BYTES = 32
KEY_TYPES = {"RS256": "RSA", "ES256": "EC"}
"""Type of the key by accepted algorithm. `none` and shared secrets are no such algorithm."""
Claims = Mapping[str, object]


class OidcRefused(Unauthenticated):
    """A sign-in that the provider or the checks refused."""


class UnknownKey(OidcRefused):
    """The provider's keys lack the key of the token: it may be newer than the cached keys."""


def verified(token: str, keys: Sequence[Claims]) -> Claims:
    """Return the claims of a token whose signature is right. Raises OidcRefused, UnknownKey."""
    try:
        if len(token) > TOKEN_BYTES:
            raise ValueError
        head_text, body_text, signature_text = token.split(".")
        head, claims = json.loads(_bytes(head_text)), json.loads(_bytes(body_text))
        signature = _bytes(signature_text)
    except (ValueError, RecursionError):
        raise OidcRefused("id_token: is not a signed token; check the provider") from None
    if not (isinstance(head, dict) and isinstance(claims, dict)):
        raise OidcRefused("id_token: is not a signed token; check the provider")
    algorithm = head.get("alg")
    if not isinstance(algorithm, str) or algorithm not in KEY_TYPES or "crit" in head:
        raise OidcRefused("id_token: its algorithm is not accepted; let the provider sign with RS256 or ES256")
    key = _key(head.get("kid"), algorithm, keys)
    try:
        _check_signature(algorithm, key, f"{head_text}.{body_text}".encode(), signature)
    except (InvalidSignature, ValueError, KeyError, TypeError, AttributeError):
        raise OidcRefused("id_token: its signature is wrong; sign in again") from None
    return claims


def check_claims(claims: Claims, *, issuer: str, client_id: str, nonce: str, now_s: float) -> None:
    """Raise OidcRefused unless the token was issued to this client, for this sign-in, and is valid now."""
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    expires, issued, given = claims.get("exp"), claims.get("iat"), claims.get("nonce")
    if claims.get("iss") != issuer:
        raise OidcRefused("id_token: another issuer made it; correct oidc.issuer")
    if client_id not in audiences:
        raise OidcRefused("id_token: it is for another client; correct oidc.client_id")
    if claims.get("azp", None if len(audiences) > 1 else client_id) != client_id:
        raise OidcRefused("id_token: it was issued to another client; correct oidc.client_id")
    if not _is_number(expires) or float(str(expires)) <= now_s - LEEWAY_S:
        raise OidcRefused("id_token: it has expired; sign in again, and compare the clocks")
    if not _is_number(issued) or float(str(issued)) > now_s + LEEWAY_S:
        raise OidcRefused("id_token: it is from the future; compare the clocks")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), nonce.encode()):
        raise OidcRefused("id_token: it is of another sign-in; sign in again")


def _is_number(value: object) -> bool:
    """Return True for a finite number: NaN would compare as neither expired nor too early."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(str(value)))


def _key(kid: object, algorithm: str, keys: Sequence[Claims]) -> Claims:
    fitting = [
        key
        for key in keys
        if key.get("kty") == KEY_TYPES[algorithm]
        and key.get("use", "sig") == "sig"
        and key.get("alg", algorithm) == algorithm
        and (kid is None or key.get("kid") == kid)
    ]
    if len(fitting) != 1:
        raise UnknownKey("id_token: the provider has no such key; sign in again")
    return fitting[0]


def _check_signature(algorithm: str, key: Claims, content: bytes, signature: bytes) -> None:
    if algorithm == "RS256":
        numbers = rsa.RSAPublicNumbers(_number(key["e"]), _number(key["n"]))
        if numbers.n.bit_length() not in RSA_BITS:
            raise ValueError
        numbers.public_key().verify(signature, content, padding.PKCS1v15(), SHA256())
        return
    if key["crv"] != "P-256" or len(signature) != 2 * P256_BYTES:
        raise ValueError
    point = ec.EllipticCurvePublicNumbers(_number(key["x"]), _number(key["y"]), ec.SECP256R1()).public_key()
    r, s = (int.from_bytes(half, "big") for half in (signature[:P256_BYTES], signature[P256_BYTES:]))
    point.verify(encode_dss_signature(r, s), content, ec.ECDSA(SHA256()))


def _number(text: object) -> int:
    return int.from_bytes(_bytes(str(text)), "big")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
