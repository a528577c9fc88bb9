"""Sign-in, sign-out and the life of a session."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from broker.api.core import sessions
from broker.api.core.auth import TokenDigest
from broker.api.core.sessions import CHECK_S, CODE_S, CODES_OF_TOKEN, SESSION_S, WebSessions
from broker.domain.errors import StoreUnavailable
from broker.ports import Store
from broker.runtime.secret_box import SecretBox
from broker.store.postgres.store import PostgresStore
from tests.api.harness import Running
from tests.conformance.samples import ManualClock
from tests.support.memory_store.store import MemoryStore
from tests.web.visitor import Visitor

DIGEST = TokenDigest("ab" * 32)


def opened(clock: ManualClock, key: bytes = b"k" * 32, store: Store | None = None) -> WebSessions:
    numbers = iter(range(1000))
    kept = store or MemoryStore(clock)
    return WebSessions(SecretBox(key), clock, lambda count: next(numbers).to_bytes(count, "big"), kept)


class HeldStore(MemoryStore):
    """Store whose answers on sessions are delayed until `release` is set."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked, self.release = asyncio.Event(), asyncio.Event()

    async def is_session_ended(self, session_id: str) -> bool:
        is_ended = await super().is_session_ended(session_id)
        self.asked.set()
        await self.release.wait()
        return is_ended


async def test_a_sign_out_during_a_look_up_is_final() -> None:
    """A look-up that began before the sign-out let a copy of the cookie in for 5 s more."""
    clock = ManualClock()
    store = HeldStore(clock)
    kept = opened(clock, store=store)
    cookie = kept.start(DIGEST)
    session = kept._unsealed(cookie)
    assert session is not None
    copy = asyncio.create_task(kept.open(cookie))
    await store.asked.wait()
    await kept.end(session)
    store.release.set()
    assert await copy is None
    assert await kept.open(cookie) is None


async def test_ended_sessions_are_remembered_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ENDED", 2)
    kept = opened(ManualClock())
    for _ in range(4):
        cookie = kept.start(DIGEST)
        session = await kept.open(cookie)
        assert session is not None
        await kept.end(session)
        assert await kept.open(cookie) is None
    assert len(kept._ended) == 2


async def test_a_token_is_exchanged_for_a_cookie_and_pages_open(ada: Visitor) -> None:
    page = await ada.get("/ui/jobs")
    assert page.status == 200
    assert "No jobs yet" in page.text
    assert "ada" in page.text


async def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(api: Running) -> None:
    async with Visitor(api) as visitor:
        token = (await api.token("ada"))["Authorization"].removeprefix("Bearer ")
        answer = await visitor.post("/ui/sign-in", token=token)
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert f"Max-Age={SESSION_S}" in cookie
        assert "Secure" not in cookie  # loopback without TLS
        public = await visitor.post(
            "/ui/sign-in", {"Sec-Fetch-Site": "same-origin", "Host": "gpu.example"}, token=token
        )
        assert public.headers["Set-Cookie"].startswith("__Host-gpubroker=")
        assert "Secure" in public.headers["Set-Cookie"]
        assert token not in cookie


async def test_pages_without_a_session_lead_to_the_sign_in_and_back(api: Running) -> None:
    async with Visitor(api) as visitor:
        away = await visitor.get("/ui/jobs?state=failed")
        assert (away.status, away.location) == (303, "/ui/sign-in?next=%2Fui%2Fjobs%3Fstate%3Dfailed")
        form = await visitor.get(away.location)
        assert 'value="/ui/jobs?state=failed"' in form.text
        token = (await api.token("ada"))["Authorization"].removeprefix("Bearer ")
        back = await visitor.post("/ui/sign-in", token=token, next="/ui/jobs?state=failed")
        assert back.location == "/ui/jobs?state=failed"


SIGN_INS = ("/ui/sign-in?code=a", "/ui/sign-in/", "/ui/jobs/../sign-in?code=a")
"""Targets that would sign the visitor in with the code of another user."""


async def test_a_theme_never_leads_to_a_sign_in(ada: Visitor) -> None:
    for target in SIGN_INS:
        assert (await ada.post("/ui/theme", next=target)).location == "/ui/jobs", target


async def test_a_sign_in_never_leads_to_another_site(api: Running) -> None:
    async with Visitor(api) as visitor:
        token = (await api.token("ada"))["Authorization"].removeprefix("Bearer ")
        for target in (
            "https://evil.example/ui",
            "//evil.example",
            "/ui//evil",
            "/\\evil",
            "/ui/\nx",
            "/v1",
            *SIGN_INS,
        ):
            assert (await visitor.post("/ui/sign-in", token=token, next=target)).location == "/ui/jobs", target


async def test_a_wrong_token_is_refused_in_the_words_of_the_api(api: Running) -> None:
    async with Visitor(api) as visitor:
        answer = await visitor.post("/ui/sign-in", token="gb_nope")
        assert answer.status == 401
        assert "give a valid token" in answer.text
        assert "Set-Cookie" not in answer.headers
        only_metrics = (await api.token("prom", "metrics"))["Authorization"].removeprefix("Bearer ")
        assert (await visitor.post("/ui/sign-in", token=only_metrics)).status == 401


async def test_a_session_ends_with_its_token(api: Running, ada: Visitor) -> None:
    assert (await ada.get("/ui/jobs")).status == 200
    await api.revoke("ada")
    assert (await ada.get("/ui/jobs")).status == 303


async def test_sign_out_ends_the_session_also_for_a_copied_cookie(api: Running, ada: Visitor) -> None:
    ((name, value),) = ada.cookies.items()
    async with Visitor(api) as thief:
        thief.set_cookie(name, value)
        assert (await thief.get("/ui/jobs")).status == 200
        assert (await ada.post("/ui/sign-out")).location == "/ui/sign-in"
        assert ada.cookies == {}
        assert (await thief.get("/ui/jobs")).status == 303


async def test_a_planted_cookie_is_not_the_session_after_the_sign_in(api: Running, ada: Visitor) -> None:
    """Session fixation: an attacker plants the own cookie, the victim signs in, and the cookie stays the attacker's."""
    ((name, value),) = ada.cookies.items()
    async with Visitor(api) as victim:
        victim.set_cookie(name, value)
        await victim.sign_in(await api.token("victim"))
        assert victim.cookies[name] != value
        assert "victim" in (await victim.get("/ui/jobs")).text
        assert "victim" not in (await ada.get("/ui/jobs")).text


async def test_a_link_signs_in_once(api: Running) -> None:
    link = await api.call("POST", "/v1/me/sign-in-links", await api.token("ada"), 201)
    async with Visitor(api) as first, Visitor(api) as second:
        lured = await first.get(link["path"], {"Sec-Fetch-Site": "cross-site"})
        assert "as <b>ada</b> of team <b>default</b>" in lured.text
        assert first.cookies == {}
        assert (await first.get(link["path"])).location == "/ui/jobs"
        assert (await first.get("/ui/jobs")).status == 200
        used = await second.get(link["path"])
        assert used.status == 401
        assert "was used or has expired" in used.text
    again = await api.call("POST", "/v1/me/sign-in-links", await api.token("ada"), 201)
    async with Visitor(api) as third:
        assert (await third.post("/ui/sign-in", code=again["path"].partition("=")[2])).location == "/ui/jobs"


async def test_a_link_of_another_site_loads_the_page_again_with_the_cookie(ada: Visitor, api: Running) -> None:
    async with Visitor(api) as without:
        answer = await without.get("/ui/jobs", {"Sec-Fetch-Site": "cross-site"})
    assert (answer.status, 'http-equiv="refresh"' in answer.text) == (200, True)


async def test_a_session_lasts_twelve_hours() -> None:
    clock = ManualClock()
    made = opened(clock)
    cookie = made.start(DIGEST)
    clock.time += timedelta(seconds=SESSION_S - 1)
    session = await made.open(cookie)
    assert session is not None
    assert session.token == DIGEST
    clock.time += timedelta(seconds=1)
    assert await made.open(cookie) is None


async def test_forged_and_foreign_cookies_are_no_session() -> None:
    clock = ManualClock()
    cookie = opened(clock).start(DIGEST)
    assert await opened(clock, b"x" * 32).open(cookie) is None
    assert await opened(clock).open(cookie[:-4] + "AAAA") is None
    assert await opened(clock).open("") is None
    assert await opened(clock).open("é" * 2000) is None


def test_a_code_is_used_once_and_expires() -> None:
    clock = ManualClock()
    made = opened(clock)
    code, until = made.code(DIGEST)
    assert until == datetime(2026, 3, 1, 12, tzinfo=UTC) + timedelta(seconds=CODE_S)
    assert made.redeem(code) == DIGEST
    assert made.redeem(code) is None
    late, _ = made.code(DIGEST)
    clock.time += timedelta(seconds=CODE_S)
    assert made.redeem(late) is None


def test_the_codes_of_one_token_drop_only_its_own() -> None:
    made = opened(ManualClock())
    theirs, _ = made.code(TokenDigest("cd" * 32))
    own = [made.code(DIGEST)[0] for _ in range(900)]
    assert made.redeem(theirs) is not None
    assert [made.peek(code) is not None for code in own[-CODES_OF_TOKEN - 1 :]] == [False, *[True] * CODES_OF_TOKEN]


async def test_codes_and_known_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "CODES", 2)
    monkeypatch.setattr(sessions, "CHECKED", 2)
    made = opened(ManualClock())
    first, *others = [made.code(DIGEST)[0] for _ in range(3)]
    assert made.redeem(first) is None
    assert all(made.redeem(code) for code in others)
    for _ in range(5):
        assert await made.open(made.start(DIGEST)) is not None
    assert len(made._checked) == 2


async def test_a_sign_out_lasts_over_a_restart_and_at_other_brokers() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    here, there = opened(clock, store=store), opened(clock, store=store)
    cookie, other = here.start(DIGEST), here.start(DIGEST)
    session = await there.open(cookie)
    assert session is not None
    await here.end(session)
    assert await here.open(cookie) is None
    clock.time += timedelta(seconds=CHECK_S)
    assert await there.open(cookie) is None  # its earlier answer is too old
    assert await opened(clock, store=store).open(cookie) is None  # a daemon that started meanwhile
    assert await there.open(other) is not None


async def test_a_sign_out_is_stored_or_the_page_says_that_it_is_not(
    api: Running, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("no database")

    monkeypatch.setattr(PostgresStore, "end_session", away)
    answer = await ada.post("/ui/sign-out")
    assert (answer.status, ada.cookies) == (503, {})
