"""Each answer of an API, and each missing answer, is classified by its meaning for the request."""

import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.common.http_json import Rest
from tests.unit.providers.answers import Api, serving


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving() as api:
        yield api


async def call(api: Api) -> object:
    rest = Rest("Cloud", api.url + "/", {"Authorization": "Bearer test-key"}, key_help="make one at https://x")
    try:
        return await rest.call("GET", "/a", query={"q": "1"})
    finally:
        await rest.close()


async def test_the_answer_is_decoded(api: Api) -> None:
    api.routes["GET /a"] = lambda body, query: {"q": query["q"]}
    assert await call(api) == {"q": "1"}
    assert api.asked == [("GET /a", None, "Bearer test-key")]
    api.routes["GET /a"] = lambda body, query: web.Response(status=200)
    assert await call(api) is None


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (400, Rejected, "400 why so"),
        (401, Rejected, "make one at https://x"),
        (403, OutcomeUnknown, "403 by a proxy or a CDN, not by Cloud"),
        (404, OutcomeUnknown, "404 why so"),
        (408, OutcomeUnknown, "408"),
        (409, Rejected, "409"),
        (429, Throttled, "too many requests"),
        (500, OutcomeUnknown, "500 why so"),
        (503, OutcomeUnknown, "503"),
        (304, OutcomeUnknown, "304"),
    ],
)
async def test_each_http_status_has_its_error(api: Api, status: int, kind: type[ProviderError], says: str) -> None:
    api.routes["GET /a"] = lambda body, query: web.Response(status=status, text="" if status == 304 else "why\n so")
    with pytest.raises(kind, match=says) as e:
        await call(api)
    assert e.type is kind
    assert "\n" not in str(e.value)
    assert "test-key" not in str(e.value)


@pytest.mark.parametrize(("header", "seconds"), [
    ("2.5", 2.5), ("soon", 5.0), (None, 5.0), ("Thu, 01 Jan 2026 00:00:00 GMT", 0.0),
    ("Thu, 01 Jan 2026 00:00:00 -0000", 5.0), ("Thu Jan  1 00:00:00 2026", 0.0), ("30s", 30.0), ("30 seconds", 30.0),
    ("0", 0.0), ("-7", 5.0), ("1.2.3", 5.0), ("99999999", 3600.0), ("1764000000", 0.0), ("99999999999", 3600.0),
    ("Fri, 01 Jan 2100 00:00:00 GMT", 3600.0), ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0), ("Thu, 99 Jan 2026", 5.0),
])  # fmt: skip
async def test_retry_after_in_seconds_is_read(api: Api, header: str | None, seconds: float) -> None:
    headers = {"Retry-After": header} if header else {}
    api.routes["GET /a"] = lambda body, query: web.Response(status=429, headers=headers)
    with pytest.raises(Throttled) as e:
        await call(api)
    assert e.value.after_s == seconds


async def test_retry_after_as_a_date_is_read(api: Api) -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    api.routes["GET /a"] = lambda body, query: web.Response(status=429, headers={"Retry-After": then})
    with pytest.raises(Throttled) as e:
        await call(api)
    assert 3000 < e.value.after_s <= 3600


async def test_an_answer_that_is_not_json_is_reported(api: Api) -> None:
    api.routes["GET /a"] = lambda body, query: web.Response(text="<html>")
    with pytest.raises(OutcomeUnknown, match="not JSON"):
        await call(api)


async def test_an_unreachable_server_is_reported(api: Api) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        api.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(OutcomeUnknown, match="Cloud: GET /a"):
            await call(api)


@pytest.mark.parametrize("charset", ["utf-16", "no-such-charset"])
@pytest.mark.parametrize(("status", "kind"), [(429, Throttled), (502, OutcomeUnknown), (401, Rejected)])
async def test_errors_in_a_wrong_character_set_keep_their_status(
    api: Api, charset: str, status: int, kind: type[ProviderError]
) -> None:
    headers = {"Content-Type": f"text/plain; charset={charset}"}
    api.routes["GET /a"] = lambda body, query: web.Response(status=status, body=b"caf\xe9!", headers=headers)
    with pytest.raises(kind) as e:
        await call(api)
    assert e.type is kind


@pytest.mark.parametrize(("body", "read"), [(b'\xef\xbb\xbf{"a": 1}', {"a": 1}), (b" \n", None)])
async def test_answers_with_a_byte_order_mark_or_blanks_are_read(api: Api, body: bytes, read: object) -> None:
    api.routes["GET /a"] = lambda _, query: web.Response(body=body)
    assert await call(api) == read


KEY_HELP = "make one at https://x"


@pytest.mark.parametrize(
    ("status", "text", "kind", "says"),
    [
        (403, "<html>Attention Required! | Cloudflare</html>", OutcomeUnknown, "by a proxy or a CDN"),
        (403, "<!DOCTYPE html><title>Just a moment...</title>", OutcomeUnknown, "by a proxy or a CDN"),
        (403, "", OutcomeUnknown, "by a proxy or a CDN"),
        (401, "<html>login</html>", OutcomeUnknown, "by a proxy or a CDN"),
        (403, '{"error": "forbidden"}', Rejected, KEY_HELP),
        (404, '{"error": "auth_error", "msg": "Invalid user key"}', Rejected, KEY_HELP),
        (400, '{"error": {"code": "global/invalid-api-key"}}', Rejected, KEY_HELP),
        (404, '{"error": "not_found"}', OutcomeUnknown, "404"),
        (404, "<html>invalid api key</html>", OutcomeUnknown, "404"),
        (400, '{"error": "invalid_args", "msg": "no such key of the filter"}', Rejected, "400"),
        (403, '{"detail": "Your spend limit is reached"}', Rejected, "pay in at Cloud"),
        (403, '{"error": "insufficient credit"}', Rejected, "pay in at Cloud"),
        (401, '{"error": "Your balance is too low"}', Rejected, "pay in at Cloud"),
        (402, '{"error": "payment required"}', Rejected, "pay in at Cloud"),
        (403, '{"error": "Rate limit exceeded"}', Throttled, "403"),
        (400, '{"code": "RequestLimitExceeded", "message": "Request limit exceeded."}', Throttled, "400"),
        (429, "<html>Just a moment...</html>", Throttled, "429"),
        (425, '{"error": "too early"}', OutcomeUnknown, "425"),
        (200, "[" * 100_000, OutcomeUnknown, "not JSON"),
    ],
)
async def test_errors_are_read_by_their_meaning(
    api: Api, status: int, text: str, kind: type[ProviderError], says: str
) -> None:
    api.routes["GET /a"] = lambda body, query: web.Response(status=status, text=text)
    with pytest.raises(kind, match=says) as e:
        await call(api)
    assert e.type is kind
