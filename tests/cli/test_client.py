"""Client: feeds that survive a daemon's restart, retries, and verified files."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from broker.api.schemas.files import ArtifactView
from broker.cli.core.command import cli_error
from broker.cli.core.exit_codes import Exit
from broker.cli.core.output import Output
from broker.cli.jobs import artifacts as results
from broker.client.async_client import AsyncClient
from broker.client.transport import sse
from broker.client.transport.connection import Connection
from broker.client.transport.errors import ApiError, BrokenOff, DaemonUnreachable, Damaged, NotSaved
from trainer.agent.process.child import free_port

JOB = "a" * 13


def event(seq: int) -> bytes:
    return (
        f'id: {seq}\nevent: job.x\ndata: {{"seq": {seq}, "at": null, "kind": "job.x", "message": "", '
        '"attempt_id": null, "data": {}}\n\n'
    ).encode()


class Daemon:
    """Emulated daemon that answers on a port of its own and can be stopped."""

    def __init__(self) -> None:
        self.port = free_port()  # a port that no other process gets while nothing answers here
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self, *answers: bytes) -> None:
        """Serve a feed: each request gets the next answer, then the connection is closed."""
        left = list(answers)

        async def feed(request: web.Request) -> web.StreamResponse:
            self.seen.append(request.headers.get("Last-Event-ID", ""))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(left.pop(0))
            if not left:
                return response
            assert request.transport is not None
            request.transport.abort()  # as kill -9 does
            return response

        app = web.Application()
        app.router.add_get(f"/v1/jobs/{JOB}/events", feed)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    daemon = Daemon()
    yield daemon
    await daemon.stop()


async def test_events_continue_after_the_last_one_that_came_whole(daemon: Daemon) -> None:
    await daemon.start(event(1) + event(2) + event(3)[:20], event(3), b"event: end\ndata: {}\n\n")
    async with AsyncClient(daemon.url, retry_for_s=30) as client:
        sequence = [e.seq async for e in client.events(JOB)]
    assert sequence == [1, 2, 3]
    assert daemon.seen == ["", "2", "3"]


async def test_a_restarted_daemon_is_found_at_its_new_address(daemon: Daemon) -> None:
    other = Daemon()
    await daemon.start(event(1), b"")
    await other.start(event(2) + b"event: end\ndata: {}\n\n")
    try:
        async with AsyncClient(
            daemon.url, retry_for_s=30, locate=lambda: Connection(url=other.url, token="new")
        ) as client:
            sequence = []
            async for e in client.events(JOB):
                sequence.append(e.seq)
                if e.seq == 1:
                    await daemon.stop()
        assert sequence == [1, 2]
        assert client.url == other.url
    finally:
        await other.stop()


async def test_a_call_retries_until_its_wait_is_over(daemon: Daemon) -> None:
    async with AsyncClient(daemon.url, retry_for_s=0) as client:
        with pytest.raises(DaemonUnreachable, match=daemon.url):
            await client.job(JOB)
    async with AsyncClient(daemon.url, retry_for_s=30) as client:
        task = asyncio.create_task(client.job(JOB))
        await asyncio.sleep(0)
        await daemon.start(b"")
        with pytest.raises(
            ApiError, match="is this a gpubroker"
        ):  # a server answers, with a 404 that is not a problem document
            await task


async def test_a_port_without_http_is_reported() -> None:
    async def frames(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00")  # as gRPC's server greets
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(frames, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncClient(url) as client:
            with pytest.raises(DaemonUnreachable, match="speaks no HTTP; is it the port of gRPC") as raised:
                await client.job(JOB)
    assert cli_error(raised.value).code == Exit.UNREACHABLE


async def test_an_event_that_was_cut_off_is_dropped() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for line in (b": alive\n", b"\n", b"id: 7\r\n", b"data: a\n", b"data:b\n", b"\n", b"data: cut off\n"):
            yield line

    assert [m async for m in sse.messages(lines())] == [sse.ReceivedEvent(event="message", data="a\nb", id="7")]


@pytest.mark.parametrize("path", ["../up", "/etc/x", "a/../../b"])
async def test_files_never_leave_the_folder(tmp_path: Path, path: str) -> None:
    file = ArtifactView(path=path, bytes=0, sha256="")
    with pytest.raises(NotSaved, match="outside"):
        await results.download(AsyncClient("http://x"), JOB, [file], tmp_path / "to", Output(as_json=True))


SHARD = bytes(range(256)) * (3 << 12)
VIEW = ArtifactView(path="adapter/a", bytes=len(SHARD), sha256=hashlib.sha256(SHARD).hexdigest())


@asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[str]:
    """Yield a daemon that announces SHARD, but sends the next bytes at each request and closes the connection."""
    left = list(answers)

    async def artifact(request: web.Request) -> web.StreamResponse:
        data = left.pop(0)
        response = web.StreamResponse()
        response.content_length = max(len(SHARD), len(data))
        await response.prepare(request)
        await response.write(data)
        if len(data) < len(SHARD):
            assert request.transport is not None
            request.transport.close()  # once what was written is sent
        return response

    app = web.Application()
    app.router.add_get(f"/v1/jobs/{JOB}/artifacts/adapter/a", artifact)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def files_in(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.is_file()]


async def fetched(url: str, folder: Path, retry_for_s: float = 0.0) -> None:
    async with AsyncClient(url, retry_for_s=retry_for_s) as client:
        await results.download(client, JOB, [VIEW], folder, Output(as_json=True))


async def test_a_file_comes_whole(tmp_path: Path) -> None:
    async with serving(SHARD) as url:
        await fetched(url, tmp_path)
    assert (tmp_path / "adapter" / "a").read_bytes() == SHARD
    assert files_in(tmp_path) == ["a"]


@pytest.mark.parametrize("sent", [SHARD[:-1] + b"x", SHARD + b"x"])
async def test_a_damaged_file_is_not_left_behind(sent: bytes, tmp_path: Path) -> None:
    async with serving(sent) as url:
        with pytest.raises(Damaged, match="adapter/a: the bytes differ"):
            await fetched(url, tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("sent", [SHARD[:-1], SHARD[:100], b""])
async def test_an_interrupted_download_keeps_the_existing_file(sent: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "a").write_text("of an earlier step")
    async with serving(sent) as url:
        with pytest.raises(BrokenOff, match=rf"adapter/a of job {JOB} broke off after \d+ of {len(SHARD)} bytes"):
            await fetched(url, tmp_path)
    assert (tmp_path / "adapter" / "a").read_text() == "of an earlier step"
    assert files_in(tmp_path) == ["a"]


async def test_an_interrupted_download_is_retried_within_the_wait(tmp_path: Path) -> None:
    async with serving(SHARD[:100], SHARD) as url:
        await fetched(url, tmp_path, retry_for_s=120)
    assert (tmp_path / "adapter" / "a").read_bytes() == SHARD


async def test_broken_and_damaged_replies_are_server_problems_not_absence() -> None:
    assert cli_error(BrokenOff("x")).code is cli_error(Damaged("x")).code is Exit.SERVER_PROBLEM


async def test_a_file_is_sent_again_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(SHARD)
    bodies: list[bytes] = []

    async def upload(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        if len(bodies) == 1:
            return web.Response(status=503)
        kept = {"ref": "upload:x", "sha256": "x", "bytes": len(bodies[-1]), "name": "rows.csv", "summary": None}
        return web.json_response(kept, status=201)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/uploads", upload)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with AsyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}", retry_for_s=120) as client:
            assert (await client.upload(tmp_path / "rows.csv", name="rows.csv")).bytes == len(SHARD)
    finally:
        await runner.cleanup()
    assert bodies == [SHARD, SHARD]
