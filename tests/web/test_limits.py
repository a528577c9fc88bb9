"""Slow, large and malformed requests of browsers: refused in time, and never answered with 500."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType

import pytest

from broker.api.http import connections
from broker.api.http.context import STREAMS
from broker.web import anonymous_forms, file_form, rendering
from broker.web.anonymous_forms import ANONYMOUS_FORMS, FORM_BYTES, FORMS_AT_ONCE
from tests.api.harness import Running
from tests.web.visitor import OWN, Visitor

TIMEOUT_S = 30.0


@asynccontextmanager
async def slow_post(api: Running, path: str, *headers: str) -> AsyncIterator[asyncio.StreamReader]:
    """Send the head of a form, and never its body."""
    host = api.url.removeprefix("http://")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rsplit(":", 1)[1]))
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Sec-Fetch-Site: same-origin", "Content-Length: 100", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    try:
        yield reader
    finally:
        writer.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():  # noqa: ASYNC110 (the server counts and signals nothing)
            await asyncio.sleep(0)


async def answer_of(reader: asyncio.StreamReader) -> str:
    async with asyncio.timeout(TIMEOUT_S):
        return (await reader.readline()).decode()


async def test_slow_forms_without_a_session_leave_slots_for_others(
    api: Running, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anonymous_forms, "FORM_S", 2 * TIMEOUT_S)
    forms = api.app[ANONYMOUS_FORMS]
    async with AsyncExitStack() as held:
        for _ in range(FORMS_AT_ONCE):
            await held.enter_async_context(slow_post(api, "/ui/theme"))
        await until(lambda: forms.reading == FORMS_AT_ONCE)
        refused = await answer_of(await held.enter_async_context(slow_post(api, "/ui/sign-in")))
        assert " 503 " in refused
        assert (await ada.get("/ui/jobs")).status == 200
    await until(lambda: forms.reading == 0)
    assert (await ada.send("/ui/theme", theme="dark")).status == 303


async def test_refused_forms_of_strangers_leave_nothing_in_memory(api: Running) -> None:
    async with Visitor(api) as stranger:
        for path in ("/ui/sign-in", "/ui/theme"):
            assert (await stranger.raw(path, OWN, b"token=\xff")).status == 422
    gc.collect()
    frames = [thing.f_code.co_name for thing in gc.get_objects() if isinstance(thing, FrameType)]
    assert "_fields" not in frames


async def test_a_path_of_many_segments_is_looked_up_in_part(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up of each prefix among all pages held the event loop for 3 s, without a token."""
    looked_up: list[str] = []
    monkeypatch.setattr(rendering, "_is_page", lambda _, path: looked_up.append(path))
    async with Visitor(api) as stranger:
        assert (await stranger.raw("/ui" + "/a" * (connections.MAX_SEGMENTS - 1), OWN, b"")).status == 404
    assert 0 < len(looked_up) <= rendering.MAX_SEGMENTS


@pytest.mark.parametrize("path", ["/ui/sign-in", "/ui/theme"])
async def test_a_form_without_a_session_has_few_bytes_and_seconds(
    api: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with Visitor(api) as visitor:
        large = await visitor.send(path, token="a" * FORM_BYTES)
    assert large.status == 413
    monkeypatch.setattr(anonymous_forms, "FORM_S", 0.05)
    async with slow_post(api, path) as reader:
        assert " 422 " in await answer_of(reader)


async def test_an_upload_takes_a_stream_and_must_begin_in_time(
    api: Running, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada_cookie = "; ".join(f"{name}={value}" for name, value in ada.cookies.items())
    monkeypatch.setattr(file_form, "FILE_S", 1.0)
    head = (f"Cookie: {ada_cookie}", "Content-Type: multipart/form-data; boundary=b")
    async with slow_post(api, "/ui/new/upload", *head) as reader:
        await until(lambda: api.app[STREAMS].open == 1)
        assert " 422 " in await answer_of(reader)
    assert api.app[STREAMS].open == 0


@pytest.mark.parametrize("kind", ["text/plain", "multipart/mixed; boundary=b", "multipart/form-data", "multipart/x"])
async def test_an_upload_that_is_no_form_is_refused_next_to_the_field(ada: Visitor, kind: str) -> None:
    for body in (b"", b"--b\r\nno header\r\n\r\n", b"--b\r\n\x00: 1\r\n\r\na\r\n--b--"):
        answer = await ada.raw("/ui/new/upload", {**OWN, "Content-Type": kind}, body)
        assert answer.status == 422, body
        assert "no file came" in answer.text


async def test_malformed_hosts_and_origins_are_refused(api: Running) -> None:
    async with Visitor(api) as visitor:
        for host in ("[", "a:99999", "a:b", "[::1"):
            for path in ("/ui/jobs", "/ui/sign-in"):
                assert (await visitor.get(path, {"Host": host})).status == 400, host
            assert (await visitor.post("/ui/theme", {**OWN, "Host": host})).status == 400, host
        for origin in ("http://[", "//[::1"):
            assert (await visitor.post("/ui/theme", {"Origin": origin})).status == 403, origin


async def test_a_form_has_few_bytes_and_its_long_fields_are_not_echoed(api: Running) -> None:
    async with Visitor(api) as boss:
        await boss.sign_in(await api.token("boss", "read", "submit", "manage"))
        for path in ("/ui/team/tokens", "/ui/team/policies", "/ui/new/quote"):
            assert (await boss.send(path, name="a" * (1 << 18))).status == 413, path
        answer = await boss.send("/ui/team/tokens", owner="a" * 200_000)
    assert (answer.status, len(answer.text) < 50_000) == (422, True)
