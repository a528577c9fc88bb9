"""Sign-in by an OpenID Connect provider, and each refusal."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from pydantic import ValidationError

from broker.domain.errors import StoreUnavailable
from broker.runtime.clock import SystemClock
from broker.web.oidc import provider as client
from broker.web.oidc.config import OidcConfig
from broker.web.oidc.id_token import OidcRefused, verified
from broker.web.oidc.pages import OIDC
from tests.api.harness import Running, memory_blobs, serving
from tests.conformance.samples import ManualClock
from tests.support.memory_store.store import MemoryStore
from tests.web.oidc_provider import CLIENT, SECRET, LoopbackProvider, encoded, new_key, provider_on_loopback
from tests.web.visitor import Answer, Visitor

START = "/ui/sign-in/oidc?next=%2Fui%2Fspend"
BACK = {"Sec-Fetch-Site": "cross-site"}


@pytest.fixture
async def issuer() -> AsyncIterator[LoopbackProvider]:
    async with provider_on_loopback() as provider:
        yield provider


def config(issuer: LoopbackProvider, folder: Path, **changes: Any) -> OidcConfig:
    secret = folder / "oidc-secret"
    secret.write_text(SECRET + "\n")
    groups = {"ml": {"team": "research"}, "leads": {"team": "research", "scopes": ["read", "manage"]}}
    values = {
        "issuer": issuer.issuer, "client_id": CLIENT, "client_secret_file": secret,
        "public_url": "http://127.0.0.1:7070", "groups": groups,
    }  # fmt: skip
    return OidcConfig.model_validate(values | changes)


@pytest.fixture
async def api(issuer: LoopbackProvider, tmp_path: Path) -> AsyncIterator[Running]:
    async with serving(MemoryStore(SystemClock()), memory_blobs(), oidc=config(issuer, tmp_path)) as running:
        await running.service.store.put_team("research", "")
        yield running


async def authorized(visitor: Visitor) -> str:
    """Return the path to which the provider sends the browser back."""
    start = await visitor.get(START)
    assert start.status == 303, start.text
    async with aiohttp.ClientSession() as http, http.get(start.location, allow_redirects=False) as answer:
        back = urlsplit(answer.headers["Location"])
        return f"{back.path}?{back.query}"


async def signed_in(visitor: Visitor) -> Answer:
    return await visitor.get(await authorized(visitor), BACK)


async def test_a_member_signs_in_and_out(api: Running, issuer: LoopbackProvider) -> None:
    issuer.claims = {"groups": ["other", "leads", "ml"]}
    async with Visitor(api) as visitor:
        assert "Sign in with your organisation" in (await visitor.get("/ui/sign-in")).text
        answer = await signed_in(visitor)
        assert (answer.status, answer.location) == (303, "/ui/spend")
        page = await visitor.get("/ui/jobs")
        assert "grace" in page.text
        (token,) = [row for row in await api.service.store.tokens() if row.owner == "grace"]
        assert (token.team, set(token.scopes)) == ("research", {"read", "submit", "manage"})
        assert token.expires_at is not None
        assert (await visitor.post("/ui/sign-out")).location == "/ui/sign-in"
        assert (await visitor.get("/ui/jobs")).status == 303
    admin = await api.token("root", "admin")
    entries = (await api.call("GET", "/v1/audit?team=research", admin, 200))["items"]
    assert [entry["actor"] for entry in entries if "token" in entry["action"]] == ["grace"]


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"nonce": "other"}, "another sign-in"),
        ({"nonce": None}, "another sign-in"),
        ({"aud": "other"}, "for another client"),
        ({"aud": [CLIENT, "other"]}, "issued to another client"),
        ({"azp": "other"}, "issued to another client"),
        ({"exp": time.time() - 100}, "has expired"),
        ({"exp": float("nan")}, "has expired"),
        ({"iat": float("nan")}, "from the future"),
        ({"nonce": "\ud800"}, "another sign-in"),
        ({"iat": time.time() + 900}, "from the future"),
        ({"iss": "http://127.0.0.1:1"}, "another issuer"),
        ({"groups": ["strangers"]}, "none of your groups"),
        ({"groups": "ml"}, "none of your groups"),
        ({"sub": 7}, "the claim sub is no name"),
    ],
)
async def test_a_wrong_claim_is_refused(
    api: Running, issuer: LoopbackProvider, claims: dict[str, Any], reason: str
) -> None:
    issuer.claims = claims
    async with Visitor(api) as visitor:
        answer = await signed_in(visitor)
        assert answer.status == 401
        assert reason in answer.text
        assert visitor.cookies == {}


async def test_a_wrong_signature_or_algorithm_is_refused(api: Running, issuer: LoopbackProvider) -> None:
    published = new_key("first")
    for head, reason in (
        ({}, "signature is wrong"),
        ({"kid": "unknown"}, "no such key"),
        ({"alg": "none"}, "algorithm is not accepted"),
        ({"alg": "HS256"}, "algorithm is not accepted"),
        ({"alg": "ES256"}, "no such key"),
        ({"crit": ["b64"]}, "algorithm is not accepted"),
    ):
        issuer.published, issuer.head = [published], head
        async with Visitor(api) as visitor:
            answer = await signed_in(visitor)
            assert (answer.status, reason in answer.text) == (401, True), (head, answer.text)


async def test_states_and_codes_serve_once_and_one_browser(api: Running, issuer: LoopbackProvider) -> None:
    async with Visitor(api) as visitor, Visitor(api) as other:
        path = await authorized(visitor)
        (flow,) = visitor.cookies.items()
        assert "another browser" in (await other.get(path, BACK)).text
        assert (await visitor.get(path, BACK)).status == 303
        visitor.set_cookie(*flow)
        assert "was used" in (await visitor.get(path, BACK)).text
        code = parse_qs(urlsplit(path).query)["code"][0]
        again = parse_qs(urlsplit(await authorized(other)).query)["state"][0]
        replayed = await other.get(f"/ui/sign-in/oidc/callback?code={code}&state={again}", BACK)
        assert "the provider refused with status 400" in replayed.text


async def test_an_error_of_the_provider_is_one_line(api: Running) -> None:
    async with Visitor(api) as visitor:
        state = parse_qs(urlsplit(await authorized(visitor)).query)["state"][0]
        back = await visitor.get(f"/ui/sign-in/oidc/callback?error=access_denied&state={state}", BACK)
        assert "the provider refused: access_denied; sign in again" in back.text
        assert state not in back.text


async def test_a_planted_session_is_replaced(api: Running) -> None:
    async with Visitor(api) as ada, Visitor(api) as victim:
        await ada.sign_in(await api.token("ada"))
        ((name, value),) = ada.cookies.items()
        victim.set_cookie(name, value)
        await signed_in(victim)
        assert victim.cookies[name] != value


async def test_changed_keys_are_fetched_again(
    api: Running, issuer: LoopbackProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REFETCH_S", 0.0)
    async with Visitor(api) as visitor:
        assert (await signed_in(visitor)).status == 303
        issuer.key = new_key("second", is_rsa=False)
        assert (await signed_in(visitor)).status == 303


@pytest.mark.parametrize(
    "discovery",
    [
        {"issuer": "http://127.0.0.1:1"},
        {"authorization_endpoint": "http://idp.example/a"},
        {"a": "b" * 300_000},
        {"authorization_endpoint": "https://idp.example/a\r\nSet-Cookie: a=b"},
    ],
)
async def test_a_wrong_discovery_document_is_refused(
    api: Running, issuer: LoopbackProvider, discovery: dict[str, Any]
) -> None:
    issuer.discovery = discovery
    async with Visitor(api) as visitor:
        assert (await visitor.get(START)).status == 401


async def test_a_provider_that_hangs_delays_no_sign_in_for_long(
    api: Running, issuer: LoopbackProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WAIT_S", 0.05)
    provider = api.app[OIDC].provider
    async with provider._lock, Visitor(api) as visitor:  # another sign-in waits for the provider
        assert "does not answer" in (await visitor.get(START)).text


async def test_an_error_of_the_database_is_not_shown(
    api: Running, issuer: LoopbackProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object, **__: object) -> bool:
        raise StoreUnavailable("relation secrets at db.internal")

    async with Visitor(api) as visitor:
        back = await authorized(visitor)
        monkeypatch.setattr(api.service.store, "is_session_ended", down)
        answer = await visitor.get(back, BACK)
        assert answer.status == 503
        assert "the database gave no answer" in answer.text
        assert "db.internal" not in answer.text


async def test_a_private_address_needs_the_setting(issuer: LoopbackProvider, tmp_path: Path) -> None:
    settings = config(issuer, tmp_path).model_copy(update={"issuer": "https://10.255.255.1"})
    with pytest.raises(OidcRefused, match="has a private address"):
        await client.OidcProvider(settings, ManualClock()).endpoint("token_endpoint")


async def test_names_become_owners_without_collision(api: Running, issuer: LoopbackProvider) -> None:
    for name in ("Grace@Example.org", "grace.example.org"):
        issuer.claims = {"sub": name}
        async with Visitor(api) as visitor:
            assert (await signed_in(visitor)).status == 303
    owners = {token.owner for token in await api.service.store.tokens()}
    assert len(owners) == 2
    assert all(owner.startswith("grace-example-org-") for owner in owners)


def test_plain_http_is_for_loopback(issuer: LoopbackProvider, tmp_path: Path) -> None:
    for url in ("http://idp.example", "https://me@idp.example", "ftp://idp.example", "https://"):
        with pytest.raises(ValidationError, match="must be https"):
            OidcConfig.model_validate(config(issuer, tmp_path).model_dump() | {"issuer": url})


def test_signatures_of_both_kinds() -> None:
    for is_rsa in (True, False):
        key = new_key("k", is_rsa=is_rsa)
        token = key.signed({"sub": "a"})
        assert verified(token, [key.public()]) == {"sub": "a"}
        head, _, signature = token.split(".")
        with pytest.raises(OidcRefused, match="signature is wrong"):
            verified(f"{head}.{encoded(b'{}')}.{signature}", [key.public()])
    for text in ("", "a.b", "a.b.c", "é.b.c", "x" * 40_000):
        with pytest.raises(OidcRefused, match="not a signed token"):
            verified(text, [])
