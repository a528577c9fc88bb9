"""Data sets that the daemon reads from the Hub or a URL: allowed hosts only, bounded, and no private address."""

import asyncio
import contextlib
import errno
import gzip
import shutil
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from broker.api.core.upload_spool import KEPT_FREE_BYTES
from broker.api.http.context import CONTENT
from broker.api.imports.data_fetch import DataFetcher
from broker.api.service import content
from broker.domain.errors import InvalidInput
from broker.runtime.clock import SystemClock
from tests.api.harness import CSV, MODEL, SETTINGS, Running, memory_blobs, serving, spec
from tests.support.memory_store.store import MemoryStore


@dataclass
class Hub:
    """A Hub on this host, which redirects to storage as the real one does."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    elsewhere: str = ""
    """Address to which the file `away.csv` redirects."""

    async def listing(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.match_info["name"] == "missing":
            return web.json_response({"error": "not found"}, status=404)
        if request.match_info["name"] == "odd":
            return web.json_response(["no", "listing"])
        files = ["README.md", "data/train-0.csv", "data/train-1.csv", "test.csv", "away.csv", "loop.csv", "large.csv"]
        return web.json_response({"sha": "c0ffee", "siblings": [{"rfilename": name} for name in files]})

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if name == "away.csv":
            raise web.HTTPFound(self.elsewhere)
        if name == "loop.csv":
            raise web.HTTPFound(request.path)
        if not request.path.startswith("/storage"):
            raise web.HTTPFound(f"/storage/{name}")
        if name == "packed.csv":
            return web.Response(body=gzip.compress(bytes(1 << 20)), headers={"Content-Encoding": "gzip"})
        return web.Response(body=b"x" * 300_000 if name == "large.csv" else CSV.encode())


@asynccontextmanager
async def hub() -> AsyncIterator[Hub]:
    hub = Hub()
    app = web.Application()
    app.router.add_get("/api/datasets/{owner}/{name}/revision/{revision}", hub.listing)
    app.router.add_get("/datasets/{owner}/{name}/resolve/{commit}/{file:.+}", hub.resolve)
    app.router.add_get("/storage/{file:.+}", hub.resolve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield hub
    finally:
        await runner.cleanup()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Running, Hub]]:
    async with hub() as made:
        settings = replace(SETTINGS, hub=made.url)
        async with serving(MemoryStore(SystemClock()), memory_blobs(), settings=settings) as api:
            yield api, made


async def fetch(api: Running, source: str, status: int = 201, owner: str = "ada") -> dict[str, Any]:
    return await api.call("POST", "/v1/imports", await api.token(owner), status, json={"source": source})


def line(answer: dict[str, Any]) -> str:
    """Return the message of the one fault, which is about the source."""
    (fault,) = answer["errors"]
    assert fault["field"] == "source"
    return str(fault["message"])


async def test_a_data_set_of_the_hub_becomes_an_upload(served: tuple[Running, Hub]) -> None:
    api, made = served
    stored = await fetch(api, "hf://datasets/ambrose/cynic@v1/test.csv")
    assert (stored["name"], stored["bytes"]) == ("test.csv", len(CSV.encode()))
    assert "word" in stored["summary"]["columns"]
    assert made.asked == ["/api/datasets/ambrose/cynic/revision/v1"]
    quote = spec(stored["ref"], train={"model": MODEL, "data": {"path": stored["ref"], "prompt": "{word}",
                                                               "completion": "{definition}"}})  # fmt: skip
    await api.call("POST", "/v1/jobs", await api.token("ada"), 202, json=quote)
    await api.call("POST", "/v1/jobs", await api.token("eve"), 422, json=quote)  # an upload belongs to its owner


async def test_an_answer_that_is_compressed_is_not_inflated(
    served: tuple[Running, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would inflate it on the event loop, and a user may own the source."""

    async def inflate(*_: object, **__: object) -> bytes:
        raise AssertionError("was inflated")

    monkeypatch.setattr("aiohttp.compression_utils.ZLibDecompressor.decompress", inflate)
    monkeypatch.setattr("aiohttp.compression_utils.ZLibDecompressor.decompress_sync", inflate)
    assert "sends it compressed" in line(await fetch(served[0], f"{served[1].url}/storage/packed.csv", 422))


async def test_training_tables_of_the_hub_are_packed_as_one(served: tuple[Running, Hub]) -> None:
    stored = await fetch(served[0], "hf://datasets/ambrose/cynic")
    assert stored["name"] == "data.tar"
    again = await fetch(served[0], "hf://datasets/ambrose/cynic/data/*.csv")
    assert again["summary"]["rows"] == stored["summary"]["rows"] == 2 * (CSV.count("\n") - 1)


async def test_a_url_of_an_allowed_host_is_read(served: tuple[Running, Hub]) -> None:
    api, made = served
    assert (await fetch(api, f"{made.url}/storage/words%20of%20war.csv?sig=1"))["name"] == "words of war.csv"


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("http://huggingface.co/x.csv", "must be an https URL"),
        ("https://huggingface.co:8443/x.csv", "must be an https URL without a port"),
        ("https://169.254.169.254/latest/meta-data", "not among the daemon's data_hosts"),
        ("https://[::1]/x.csv", "not among the daemon's data_hosts"),
        ("https://huggingface.co.evil.example/x.csv", "not among the daemon's data_hosts"),
        ("https://evilhf.co/x.csv", "not among the daemon's data_hosts"),
        ("https://ada:key@huggingface.co/x.csv", "not an address of data"),
        ("file:///etc/passwd", "not an address of data"),
        ("/etc/passwd", "not an address of data"),
        ("ftp://huggingface.co/x.csv", "must be an https URL"),
        ("s3://bucket/x.csv", "must be an https URL"),
        ("hf://datasets/../../etc", "not a data set of the Hub"),
        ("hf://datasets/ambrose", "not a data set of the Hub"),
        ("hf://datasets/ambrose/missing", "no such public data"),
        ("hf://datasets/ambrose/odd", "no listing"),
        ("hf://datasets/ambrose/cynic/none.csv", "selects no file"),
        ("hf://datasets/ambrose/cynic/loop.csv", "redirects more than 5 times"),
        ("hf://datasets/ambrose/cynic/README.md", "no known ending"),
    ],
)
async def test_other_sources_are_refused_in_one_line(served: tuple[Running, Hub], source: str, part: str) -> None:
    assert part in line(await fetch(served[0], source, 422))


@pytest.mark.parametrize(
    "target",
    ["http://169.254.169.254/latest", "http://127.0.0.1:1/x.csv", "https://10.0.0.1/x.csv", "file:///etc/passwd",
     "https://metadata.google.internal/"],
)  # fmt: skip
async def test_no_redirect_leaves_the_allowed_hosts(served: tuple[Running, Hub], target: str) -> None:
    api, made = served
    made.elsewhere = target
    message = line(await fetch(api, "hf://datasets/ambrose/cynic/away.csv", 422))
    assert "data_hosts" in message or "https URL" in message or "not an address" in message


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("{a,b}" * 40, "alternatives"),
        ("[z-a].csv", "range z-a"),
        ("*" * 1500, "characters"),
        ("**/" * 12 + "*a" * 8 + ".none", "selects no file"),
    ],
)
async def test_a_hostile_pattern_is_refused_in_one_line(served: tuple[Running, Hub], pattern: str, part: str) -> None:
    api, made = served
    message = line(await fetch(api, f"hf://datasets/ambrose/cynic/{pattern}", 422))
    assert part in message
    assert "\n" not in message
    assert bool(made.asked) == (part == "selects no file"), "a pattern is judged before the listing"


class Private(AbstractResolver):
    """Answers every name with an address of a private network."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host="10.1.2.3", port=port, family=family, proto=6, flags=0)]

    async def close(self) -> None: ...


async def test_an_allowed_name_with_a_private_address_is_refused() -> None:
    """The check is made on the address that the socket connects to, so that no second DNS answer evades it."""
    fetcher = DataFetcher(["data.example.org"], resolver=Private())
    (file,) = await fetcher.files("https://data.example.org/x.csv")
    with pytest.raises(InvalidInput, match="has no public address"):
        await anext(fetcher.read(file))


async def test_a_source_larger_than_an_upload_is_refused(served: tuple[Running, Hub]) -> None:
    api, _ = served
    refused = await fetch(api, "hf://datasets/ambrose/cynic/large.csv", 413)
    assert "more than 200000 bytes" in refused["detail"]
    several = await fetch(api, "hf://datasets/ambrose/cynic/{large,test}.csv", 413)
    assert "more than 200000 bytes" in several["detail"]
    assert not list(SETTINGS.spool.glob("*"))


async def test_imports_wait_for_the_turns_of_uploads(
    served: tuple[Running, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token cannot fill the disk with many downloads: a download needs a turn, as an upload does."""
    api, made = served
    monkeypatch.setattr(content, "WAITING_OF_TEAM", 1)
    me = await api.token("ada", team="red")
    async with api.app[CONTENT].upload_turn("red"):
        await api.call("POST", "/v1/imports", me, 429, json={"source": "hf://datasets/ambrose/cynic"})
        assert made.asked == []
    monkeypatch.setattr(api.app[CONTENT], "_uploading", asyncio.Semaphore(1))
    assert (await fetch(api, "hf://datasets/ambrose/cynic"))["name"] == "data.tar", "an import takes one turn only"


async def test_a_pack_that_would_fill_the_disk_is_refused(
    served: tuple[Running, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files and their .tar are both on the disk, which must keep the space of the database."""
    usage, size = shutil.disk_usage, len(CSV.encode())

    def nearly_full(path: Path) -> Any:
        return usage(path)._replace(free=KEPT_FREE_BYTES + size + size // 2)

    monkeypatch.setattr("broker.api.core.upload_spool.shutil.disk_usage", nearly_full)
    monkeypatch.setattr("broker.api.imports.data_imports._pack", lambda *_: pytest.fail("packed without space"))
    assert "keeps 64 MiB" in (await fetch(served[0], "hf://datasets/ambrose/cynic", 507))["detail"]


async def test_a_disk_that_fills_while_packing_is_storage_full(
    served: tuple[Running, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("broker.api.imports.data_imports._pack", pack)
    await fetch(served[0], "hf://datasets/ambrose/cynic", 507)
    assert not list(SETTINGS.spool.glob("*"))


async def test_a_cancelled_import_ends_its_thread_before_its_folder(
    served: tuple[Running, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, folders = threading.Event(), threading.Event(), list[bool]()

    def pack(files: object, archive: Path) -> None:
        begun.set()
        release.wait(300)
        folders.append(archive.parent.is_dir())

    monkeypatch.setattr("broker.api.imports.data_imports._pack", pack)
    request = asyncio.create_task(fetch(served[0], "hf://datasets/ambrose/cynic"))
    assert await asyncio.to_thread(begun.wait, 300)
    request.cancel()
    async with asyncio.timeout(0.5):
        with contextlib.suppress(asyncio.CancelledError):
            await request
    for _ in range(50):  # the server sees the disconnect
        await asyncio.sleep(0.01)
    release.set()
    async with asyncio.timeout(300):
        while not folders or list(SETTINGS.spool.glob("*")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert folders == [True]


async def test_an_import_needs_the_scope_submit(served: tuple[Running, Hub]) -> None:
    api, made = served
    reader = await api.token("eve", "read")
    await api.call("POST", "/v1/imports", reader, 403, json={"source": f"{made.url}/storage/x.csv"})
