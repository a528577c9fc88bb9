"""Contract of every blob store. The tests run over a folder, memory, and S3 (moto's server on loopback)."""

import asyncio
import contextlib
import json
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from obstore.store import from_url
from yarl import URL

from broker.blobs import GrantSettings, ObstoreBlobs, store_listing
from broker.blobs.bucket_check import check_bucket
from broker.domain.errors import AlreadyExists, BlobError, BlobsUnavailable, BlobTooLarge, InvalidInput
from broker.domain.ids import AttemptId, Installation, JobId
from trainer.objectstore.objects import Objects, connect

HERE, NEIGHBOUR = Installation("abcd"), Installation("efgh")


@pytest.fixture(scope="module")
def s3_options() -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", _one_by_one(S3Response.put_object))
        yield from _s3_options()


def _one_by_one(method: Callable[[S3Response], Any]) -> Callable[[S3Response], Any]:
    """Serialise the handler: moto checks for an object and writes it in two steps, S3 in one."""
    lock = threading.Lock()

    def locked(self: S3Response) -> Any:
        with lock:
            return method(self)

    return locked


def _s3_options() -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "aws_endpoint": f"http://{host}:{port}", "aws_region": "us-east-1",
        "aws_access_key_id": "test", "aws_secret_access_key": "test",
    }  # fmt: skip
    request = urllib.request.Request(f"{options['aws_endpoint']}/bucket", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request")
    urllib.request.urlopen(request).close()
    yield options
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """Return (url, options) of an empty store."""
    if request.param == "file":
        return f"file://{tmp_path_factory.mktemp('blobs')}", {}
    if request.param == "memory":
        return "memory://", {}
    return f"s3://bucket/{request.node.originalname}", request.getfixturevalue("s3_options")


@pytest.fixture
async def blobs(place: tuple[str, dict[str, str]]) -> ObstoreBlobs:
    return ObstoreBlobs.open(place[0], HERE, options=place[1])


async def test_objects_are_put_read_listed_and_deleted(blobs: ObstoreBlobs) -> None:
    assert await blobs.get("heartbeats/b/0") is None
    await blobs.put("heartbeats/b/0", b"two")
    await blobs.put("heartbeats/a/0", b"one!")
    await blobs.put("heartbeatsx/a", b"a neighbour by name")
    assert await blobs.get("heartbeats/a/0") == b"one!"
    listed = await blobs.list("heartbeats/")
    assert [(info.key, info.bytes) for info in listed] == [("heartbeats/a/0", 4), ("heartbeats/b/0", 3)]
    await blobs.delete("heartbeats/a/0")
    await blobs.delete("heartbeats/a/0")
    assert [info.key for info in await blobs.list("heartbeats/")] == ["heartbeats/b/0"]
    assert {info.key for info in await blobs.list("")} == {"heartbeats/b/0", "heartbeatsx/a"}
    assert await blobs.list("nothing/") == []


async def test_many_objects_of_one_folder_neither_hide_nor_slow_the_others(
    blobs: ObstoreBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host wrote 100,000 objects below its own heartbeats, and each look at all heartbeats listed them."""
    monkeypatch.setattr(store_listing, "PAGE", 3)
    others = ["beats/a/0", "beats/a/1", "beats/b0/0", "beats/z/0", "beats/~"]
    crowded = [f"beats/{folder}/{n}" for folder in ("b", "ü0", "y/b/c") for n in range(9)]
    for key in (*others, *crowded):
        await blobs.put(key, b"1")
    listed = [info.key for info in await blobs.list("beats/", max_per_folder=2)]
    assert [key for key in listed if key in others] == sorted(others)
    assert Counter(key.split("/")[1] for key in listed if key in crowded) == {"b": 2, "ü0": 2, "y": 2}
    assert listed == sorted(listed)


async def test_a_listing_ends_after_as_many_objects_as_it_may_have(
    blobs: ObstoreBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(9):
        await blobs.put(f"checkpoints/j/{n}", b"1")
    assert len(await blobs.list("checkpoints/j/", max_objects=4)) == 4
    assert "checkpoints/j/ has 4 objects or more; the rest is not read" in caplog.text
    assert len(await blobs.list("checkpoints/j/", max_objects=10)) == 9


@pytest.mark.parametrize(
    ("start", "size", "found"), [(0, 4, b"0123"), (2, 3, b"234"), (0, 10, b"0123456789"), (8, 9, b"89"), (9, 1, b"9"),
                                 (10, 1, b""), (50, 5, b"")],
)  # fmt: skip
async def test_a_range_ends_with_the_object(blobs: ObstoreBlobs, start: int, size: int, found: bytes) -> None:
    await blobs.put("k/ten", b"0123456789")
    assert await blobs.get_range("k/ten", start, size) == found


async def test_an_object_over_the_limit_is_not_read(blobs: ObstoreBlobs) -> None:
    await blobs.put("k/ten", b"0123456789")
    assert await blobs.get("k/ten", max_bytes=10) == b"0123456789"
    with pytest.raises(BlobTooLarge, match="k/ten has 10 bytes, more than the 9"):
        await blobs.get("k/ten", max_bytes=9)
    await blobs.put("k/large", bytes(2 << 20))
    with pytest.raises(BlobTooLarge):
        await blobs.get("k/large")
    await blobs.put("k/empty", b"")
    assert await blobs.get("k/empty", max_bytes=0) == b""


KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "aws_region": "auto"}
REMOTE = {
    "s3": ("s3://bucket/x", lambda base: KEYS | {"aws_endpoint": base}),
    "r2": ("s3://bucket/x", lambda base: KEYS | {"aws_endpoint": base, "aws_virtual_hosted_style_request": "false"}),
    "gs": ("gs://bucket/x", lambda base: {"google_service_account_key": json.dumps(
        {"gcs_base_url": base, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})}),
    "az": ("az://container/x", lambda base: {
        "azure_storage_account_name": "account", "azure_storage_endpoint": base, "azure_skip_signature": "true"}),
}  # fmt: skip
"""(url, options for a server) of each kind of bucket."""


@pytest.mark.parametrize("kind", REMOTE)
async def test_the_body_of_an_object_over_the_limit_is_not_received(kind: str) -> None:
    """A host may write an object of gigabytes. Only what fits into the sockets' buffers is sent of it."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        head = 'HTTP/1.1 200 OK\r\nETag: "e"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nContent-Length: '
        writer.write(f"{head}{1 << 31}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(1 << 11):
                writer.write(bytes(1 << 20))
                await writer.drain()
                sent += 1 << 20
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    url, options = REMOTE[kind]
    store = from_url(url, config=options(base),
                     client_options={"allow_http": True})  # fmt: skip
    blobs = ObstoreBlobs(store, url, HERE, {}, "no credentials are issued")
    try:
        with pytest.raises(BlobTooLarge, match="has 2147483648 bytes"):
            await blobs.get("attempts/a/final.json", max_bytes=1 << 18)
        assert sent < 64 << 20
    finally:
        server.close()


async def test_ranges_of_empty_and_missing_objects_are_read(blobs: ObstoreBlobs) -> None:
    await blobs.put("k/empty", b"")
    assert await blobs.get_range("k/empty", 0, 1) == b""
    assert await blobs.get_range("k/absent", 0, 1) is None


@pytest.mark.parametrize("size", [0, 10, 12 << 20])
async def test_a_file_is_there_with_all_its_bytes_and_takes_the_place_of_another(
    blobs: ObstoreBlobs, size: int, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    await blobs.put("k/file", b"before")
    await blobs.put_file("k/file", file)
    assert await blobs.get("k/file", max_bytes=size) == file.read_bytes()
    assert [info.bytes for info in await blobs.list("k/")] == [size]


async def test_a_file_that_cannot_be_sent_leaves_no_object(blobs: ObstoreBlobs, tmp_path: Path) -> None:
    with pytest.raises((BlobsUnavailable, OSError)):
        await blobs.put_file("k/file", tmp_path / "absent")
    assert await blobs.list("k/") == []


async def test_a_prefix_that_is_no_folder_is_refused(blobs: ObstoreBlobs) -> None:
    with pytest.raises(ValueError, match="end in '/'"):
        await blobs.list("heartbeats")


async def test_folders_are_the_next_parts_of_keys_alone(blobs: ObstoreBlobs) -> None:
    for key in ("parts/a/x", "parts/a/deep/y", "parts/b/z", "parts/file", "partsother/c/x"):
        await blobs.put(key, b"1")
    assert await blobs.folders("parts/") == {"a", "b"}
    assert await blobs.folders("nothing/") == frozenset()


async def test_the_etag_changes_with_the_content_and_is_the_listed_one(blobs: ObstoreBlobs) -> None:
    first = await blobs.put("k/beat", b"1")
    assert [info.etag for info in await blobs.list("k/")] == [first]
    second = await blobs.put("k/beat", b"2")
    assert second not in ("", first)
    assert [info.etag for info in await blobs.list("k/")] == [second]


async def test_one_of_many_concurrent_puts_if_absent_wins(blobs: ObstoreBlobs) -> None:
    async def attempt(n: int) -> int | None:
        try:
            await blobs.put("final.json", str(n).encode(), if_absent=True)
        except AlreadyExists:
            return None
        return n

    winners = [n for n in await asyncio.gather(*(attempt(n) for n in range(8))) if n is not None]
    assert len(winners) == 1
    assert await blobs.get("final.json") == str(winners[0]).encode()


async def test_copy_leaves_the_source_and_needs_one(blobs: ObstoreBlobs) -> None:
    await blobs.put("uploads/x", b"data")
    await blobs.copy("uploads/x", "jobs/j/data/x")
    assert await blobs.get("jobs/j/data/x") == b"data"
    assert await blobs.get("uploads/x") == b"data"
    with pytest.raises(BlobError, match="absent"):
        await blobs.copy("uploads/none", "jobs/j/data/none")
    assert await blobs.get("jobs/j/data/none") is None


async def test_installations_in_one_store_do_not_see_each_other(place: tuple[str, dict[str, str]]) -> None:
    ours, theirs = (ObstoreBlobs.open(place[0], who, options=place[1]) for who in (HERE, NEIGHBOUR))
    await ours.put("broker/lease", b"ours")
    assert await theirs.get("broker/lease") is None
    assert await theirs.list("") == []


async def test_check_bucket_passes_and_leaves_nothing(place: tuple[str, dict[str, str]]) -> None:
    report = await check_bucket(place[0], options=place[1])
    assert report.ok, report
    assert [c.name for c in report.checks] == ["write and read", "conditional put", "list after put", "delete"]
    assert report.policy
    if place[0].startswith("file:"):
        assert list(Path(place[0].removeprefix("file://")).iterdir()) == []


async def test_a_grant_gives_what_opens_the_same_place(place: tuple[str, dict[str, str]]) -> None:
    blobs = ObstoreBlobs.open(place[0], HERE, options=place[1])
    access = await blobs.grant(JobId("j" * 13), AttemptId("a" * 13))
    assert not access.scoped
    assert not blobs.scopes
    assert blobs.local == (not place[0].startswith("s3:"))
    if place[0] == "memory://":
        assert access.options == {}
        return
    await blobs.put("k/v", b"1")
    assert await ObstoreBlobs.open(access.url, HERE, options=access.options).get("k/v") == b"1"
    assert await Objects(connect(access.url, access.options), HERE).read("k/v") == b"1"


async def test_a_signed_url_reads_one_object_where_the_store_has_urls(place: tuple[str, dict[str, str]]) -> None:
    blobs = ObstoreBlobs.open(place[0], HERE, options=place[1])
    await blobs.put("bundles/x", b"the trainer")
    if blobs.local:
        with pytest.raises(BlobError, match="cannot sign bundles/x"):
            await blobs.sign("bundles/x", for_s=60)
        return
    url = await blobs.sign("bundles/x", for_s=60)
    assert "X-Amz-Expires=60" in url
    async with aiohttp.ClientSession() as session, session.get(URL(url, encoded=True)) as answer:
        assert await answer.read() == b"the trainer"


async def test_a_reader_never_sees_half_of_an_object(tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs = ObstoreBlobs.open(f"file://{tmp_path_factory.mktemp('atomic')}", HERE)
    whole = {bytes([b]) * 3_000_000 for b in b"ab"}
    await blobs.put("big", min(whole))

    async def write() -> None:
        for _ in range(10):
            for data in whole:
                await blobs.put("big", data)

    writer = asyncio.create_task(write())
    while not writer.done():
        assert await blobs.get("big", max_bytes=3_000_000) in whole
    await writer


async def test_a_store_that_is_not_there_is_unavailable_not_empty(
    tmp_path_factory: pytest.TempPathFactory, s3_options: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("gone")
    unmounted = ObstoreBlobs.open(f"file://{folder}", HERE)
    folder.rmdir()
    no_bucket = ObstoreBlobs.open("s3://no-such-bucket/x", HERE, options=s3_options)
    with socket.socket() as reserved:  # bound, not listening: connections are refused
        reserved.bind(("127.0.0.1", 0))
        down = s3_options | {"aws_endpoint": f"http://127.0.0.1:{reserved.getsockname()[1]}"}
        for blobs in (unmounted, no_bucket, ObstoreBlobs.open("s3://bucket/x", HERE, options=down)):
            with pytest.raises(BlobsUnavailable):
                await blobs.get("heartbeats/a/0")
            with pytest.raises(BlobsUnavailable):
                await blobs.get_range("heartbeats/a/0", 0, 1)
            with pytest.raises(BlobsUnavailable):
                await blobs.put("heartbeats/a/0", b"{}")
    assert not folder.exists()  # otherwise the store could not be put back
    report = await check_bucket("s3://no-such-bucket/x", options=s3_options)
    assert not report.ok
    assert "no-such-bucket" in report.checks[0].detail


async def test_a_store_that_ignores_the_condition_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ObstoreBlobs.put

    async def careless(self: ObstoreBlobs, key: str, data: bytes, *, if_absent: bool = False) -> str:
        return await honest(self, key, data)

    monkeypatch.setattr(ObstoreBlobs, "put", careless)
    report = await check_bucket("memory://")
    assert [c.name for c in report.checks if not c.ok] == ["conditional put"]


@pytest.mark.parametrize("url", ["ftp://host/x", "file://relative/x", "/plain/path", "", "s3://"])
def test_a_bad_url_is_explained(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"^blobs: "):
        ObstoreBlobs.open(url, HERE)


@pytest.mark.parametrize("option", ["aws_allow_http", "timeout", "proxy_url", "no_such_option"])
def test_an_option_that_the_store_cannot_take_is_named(option: str) -> None:
    with pytest.raises(InvalidInput, match=option):
        ObstoreBlobs.open("s3://bucket", HERE, options={option: "1"})


async def test_environment_credentials_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    blobs = ObstoreBlobs.open(
        "s3://bucket", HERE, options={"AWS_REGION": "us-east-1"}, grants=GrantSettings(scope=False)
    )
    access = await blobs.grant(JobId("j" * 13), AttemptId("a" * 13))
    assert access.options == {
        "aws_access_key_id": "from-the-environment", "aws_secret_access_key": "hidden", "aws_region": "us-east-1",
    }  # fmt: skip
    assert "hidden" not in repr(access)


async def test_one_setting_under_two_names_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://everything.example")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3.example")
    unscoped = GrantSettings(scope=False)
    unscoped_blobs = ObstoreBlobs.open("s3://bucket", HERE, grants=unscoped)
    assert (await unscoped_blobs.grant(JobId("j" * 13), AttemptId("a" * 13))).options[
        "aws_endpoint"
    ] == "http://s3.example"
    chosen = ObstoreBlobs.open("s3://bucket", HERE, options={"endpoint": "http://ours.example"}, grants=unscoped)
    assert (await chosen.grant(JobId("j" * 13), AttemptId("a" * 13))).options == {"aws_endpoint": "http://ours.example"}
