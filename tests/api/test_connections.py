"""Invalid or incomplete requests: answered in the API's own words, bounded, and never repeated in a log."""

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator

import pytest

from broker.api.http.connections import LINE_BYTES, MAX_SEGMENTS
from broker.runtime.clock import SystemClock
from tests.api.harness import Running, memory_blobs, serving
from tests.support.memory_store.store import MemoryStore

TIMEOUT_S = 300.0


@pytest.fixture
async def api() -> AsyncIterator[Running]:
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as running:
        yield running


async def server_output(api: Running, sent: bytes, *, end: bool = False, until: bytes | None = None) -> str:
    """Return the server's output until it closes the connection, or until the output ends with `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rsplit(":", 1)[1]))
    writer.write(sent)
    if end:
        writer.write_eof()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return (await (reader.readuntil(until) if until else reader.read())).decode()
    except ConnectionError:
        return ""
    finally:
        writer.close()


async def send_without_end(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()


def post(path: str, authorization: str, body: bytes, *more: str, kind: str = "application/json") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Authorization: {authorization}",
             f"Content-Type: {kind}", *more]  # fmt: skip
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br", "gzip, identity"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/uploads?name=a.csv", "/v1/slack", "/healthz", "/nowhere"])
async def test_an_encoded_body_is_refused_without_a_token(api: Running, path: str, encoding: str) -> None:
    answer = await server_output(api, post(path, "", gzip.compress(b"{}"), f"Content-Encoding: {encoding}"))
    assert answer.startswith("HTTP/1.1 415 ")
    assert "application/problem+json" in answer
    assert "Content-Encoding" in answer


@pytest.mark.parametrize("path", ["/", "/ui", "/v1/jobs"])
async def test_a_path_of_many_segments_is_refused_before_routing(
    api: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The router looks up each prefix: 15,000 slashes held the event loop for 0.3 s, without a token."""

    async def routed(_: object) -> object:
        raise AssertionError("was routed")

    monkeypatch.setattr(api.app.router, "resolve", routed)
    answer = await server_output(
        api, f"GET {path}{'/' * MAX_SEGMENTS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.startswith("HTTP/1.1 400 ")
    assert "segments" in answer


async def test_compressed_bodies_are_never_inflated(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inflating would cost the event loop a thousand times the received bytes."""
    monkeypatch.delattr("aiohttp.http_parser.ZLibDecompressor")
    bomb = gzip.compress(b"a" * 50_000_000, 1)
    for path in ("/v1/jobs", "/v1/uploads?name=a.csv", "/v1/slack"):
        answer = await server_output(api, post(path, "", bomb, "Content-Encoding: gzip"))
        assert answer.startswith("HTTP/1.1 415 ")


@pytest.mark.parametrize("framing", ["Content-Length: 1000000000", "Transfer-Encoding: chunked"])
async def test_the_rest_of_a_refused_body_is_read_up_to_a_limit(
    api: Running, framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes at once and closes the connection, however much the client still sends."""
    monkeypatch.setattr("broker.api.http.connections.DISCARDED_BYTES", 100_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rsplit(":", 1)[1]))
    writer.write(f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
    async with asyncio.timeout(TIMEOUT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"Connection: close" in head
        with pytest.raises(ConnectionError):
            await send_without_end(writer, b"10000\r\n" + b"x" * 65536 + b"\r\n")
    writer.close()


async def test_a_client_that_sends_its_whole_body_first_gets_the_refusal(api: Running) -> None:
    answer = await server_output(api, post("/v1/uploads?name=a.csv", "", b"x" * 4_000_000, kind="text/plain"))
    assert answer.startswith("HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (f"GET /v1/jobs?label={'a' * LINE_BYTES} HTTP/1.1\r\nHost: x", "more than"),
        ("GET / HTTP/9.9", "first line"),
        ("GET /v1/jobs?team=\xff HTTP/1.1\r\nHost: x", "percent-encode"),
        ("POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2", "malformed"),
        ("POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", "malformed"),
        ("GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer gb_secret\0", "malformed"),
    ],
)
async def test_malformed_http_gets_a_problem_document_and_no_warning(
    api: Running, caplog: pytest.LogCaptureFixture, head: str, words: str
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await server_output(api, head.encode("latin-1") + b"\r\n\r\n")
    assert " 400 " in answer.split("\r\n", 1)[0]
    assert "application/problem+json" in answer
    assert words in answer
    assert "gb_secret" not in answer + caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_stalled_request_body_ends_its_connection(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.api.http.openapi.BODY_S", 0.05)
    me = (await api.token("ada"))["Authorization"]
    answer = await server_output(api, post("/v1/jobs", me, b"{}").replace(b"Length: 2", b"Length: 9"), until=b"}")
    assert answer.startswith("HTTP/1.1 422 ")
    assert "did not come within" in answer


async def test_a_client_that_leaves_is_not_counted_as_a_fault(api: Running) -> None:
    me = (await api.token("ada", "admin"))["Authorization"]
    await server_output(api, post("/v1/jobs", me, b"{}").replace(b"Length: 2", b"Length: 9"), end=True)
    async with api.http.get(f"{api.url}/metrics", headers={"Authorization": me}) as response:
        counted = [line for line in (await response.text()).splitlines() if "http_requests_total{" in line]
    assert [line for line in counted if 'status="499"' in line]
    assert not [line for line in counted if 'status="5' in line]


async def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.api.http.connections.IDLE_S", 0.05)
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as api:
        assert await server_output(api, b"GET /v1/me HTTP/1.1\r\nHost:") == ""


async def test_connections_beyond_the_limit_are_dropped() -> None:
    """Beyond the bound a connection is dropped and the others are served."""
    async with serving(MemoryStore(SystemClock()), memory_blobs(), connections=3) as api:
        port = int(api.url.rsplit(":", 1)[1])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
        writer.close()
        for reader, writer in held:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(TIMEOUT_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        async with asyncio.timeout(TIMEOUT_S):
            while not await server_output(api, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"):
                pass  # the server has not seen yet that they are closed


async def test_a_hundred_thousand_wrong_keys_get_a_short_answer(api: Running) -> None:
    body = b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}"
    answer = await server_output(api, post("/v1/teams", (await api.token("ada", "admin"))["Authorization"], body))
    assert answer.startswith("HTTP/1.1 422 ")
    assert len(answer) < 10_000
