"""Multipart uploads of large files: little memory, exact content, and no parts left after an interruption."""

import asyncio
import contextlib
import hashlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from moto.server import ThreadedMotoServer

from tests.trainer.support.harness import until
from tests.trainer.support.peak_memory import needs_a_new_peak
from trainer.contract import object_keys as keys
from trainer.objectstore import multipart
from trainer.objectstore.objects import Objects, ObjectStoreError, connect

MIB = 1 << 20
GUARD_S = 300.0
PEAK = """
import asyncio, os, pathlib, sys
from trainer.objectstore.objects import Objects, connect
store, small, large = sys.argv[1:]

def kib(name):
    lines = dict(line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])

async def main():
    objects = Objects(connect(store, {}), "inst")
    await objects.upload("warm", pathlib.Path(small))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    await objects.upload("large", pathlib.Path(large))
    print(kib("VmHWM") - before, flush=True)
    os._exit(0)  # the store's own threads may abort an interpreter that ends

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the time limit of an abort, so that a busy test machine is not mistaken for a slow store."""
    monkeypatch.setattr(multipart, "ABORT_S", GUARD_S)


def filled(path: Path, size: int) -> Path:
    block = os.urandom(MIB)
    with path.open("wb") as file:
        for at in range(0, size, MIB):
            file.write(block[: min(MIB, size - at)])
    return path


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class Bucket:
    def __init__(self, url: str, name: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = f"{url}/{name}", http
        options = {
            "aws_endpoint": url,
            "aws_access_key_id": "a",
            "aws_secret_access_key": "b",
            "aws_region": "us-east-1",
        }
        self.store = connect(f"s3://{name}", options)
        self.objects = Objects(self.store, "inst")

    async def make(self) -> None:
        async with self._http.put(
            self._url, headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/x/us-east-1/s3/x"}
        ):
            pass

    async def unfinished(self) -> list[str]:
        """Return ids of uploads that were begun and neither completed nor aborted."""
        async with self._http.get(f"{self._url}?uploads") as answer:
            return [part.partition("<")[0] for part in (await answer.text()).split("<UploadId>")[1:]]

    async def parts(self, upload: str, key: str) -> int:
        async with self._http.get(f"{self._url}/{key}", params={"uploadId": upload}) as answer:
            return (await answer.text()).count("<PartNumber>")


@pytest.fixture
async def bucket(s3: str, request: pytest.FixtureRequest) -> AsyncIterator[Bucket]:
    async with aiohttp.ClientSession() as http:
        bucket = Bucket(s3, f"b-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}", http)
        await bucket.make()
        yield bucket


def test_part_size_and_parallel_bytes_grow_with_the_file() -> None:
    assert multipart.plan(6 * MIB) == (5 * MIB, 1)
    assert multipart.plan(256 * MIB) == (5 * MIB, 4)
    part, at_once = multipart.plan(200 << 30)
    assert (-(-(200 << 30) // part), at_once) == (10_000, 12)


@needs_a_new_peak
def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    small, large = filled(tmp_path / "small", 6 * MIB), filled(tmp_path / "large", 32 * MIB)
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    argv = [sys.executable, "-c", PEAK, (tmp_path / "store").as_uri(), str(small), str(large)]
    completed = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=GUARD_S, check=True)
    assert int(completed.stdout) < 12 * 1024, completed.stdout
    assert (tmp_path / "store/inst/large").read_bytes() == large.read_bytes()


async def test_a_multipart_upload_equals_the_file(bucket: Bucket, tmp_path: Path) -> None:
    path = filled(tmp_path / "shard", 17 * MIB + 3)
    await bucket.objects.upload("shard", path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    await bucket.objects.download("shard", tmp_path / "back", size=17 * MIB + 3, sha256=sha256)
    assert await bucket.unfinished() == []


@contextlib.contextmanager
def trickle(path: Path, size: int) -> Iterator[None]:
    """Yield a file that ends when the body does, after `size` bytes of it were read."""
    os.mkfifo(path)
    over = threading.Event()

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), path.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            over.wait(GUARD_S)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def test_a_cancelled_upload_leaves_no_part(bucket: Bucket, tmp_path: Path) -> None:
    with trickle(tmp_path / "slow", 11 * MIB):
        sending = asyncio.ensure_future(multipart.upload(bucket.store, "slow", tmp_path / "slow", 32 * MIB))
        async with asyncio.timeout(GUARD_S):
            while not ((begun := await bucket.unfinished()) and await bucket.parts(begun[0], "slow")):
                assert not sending.done()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert await bucket.unfinished() == []
        assert await bucket.objects.keys("") == []


@pytest.mark.parametrize("first", [True, False], ids=["before its first part", "in the midst"])
async def test_an_upload_cancelled_repeatedly_leaves_no_part(bucket: Bucket, tmp_path: Path, first: bool) -> None:
    """The program ends while an order to stop arrives: the upload is cancelled repeatedly and must leave no part."""
    with trickle(tmp_path / "slow", 11 * MIB):
        sending = asyncio.ensure_future(multipart.upload(bucket.store, "slow", tmp_path / "slow", 32 * MIB))
        async with asyncio.timeout(GUARD_S):
            while not ((begun := await bucket.unfinished()) and (first or await bucket.parts(begun[0], "slow"))):
                assert not sending.done()
        while not sending.done():
            sending.cancel()
            await asyncio.sleep(0)
        assert sending.cancelled()
        assert await bucket.unfinished() == []


class BadDisk(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if not found:
            raise OSError(5, "Input/output error")
        return found


async def test_a_disk_that_fails_leaves_no_part(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = filled(tmp_path / "shard", 12 * MIB)

    def opened(*_: Any) -> BadDisk:
        return BadDisk(bytes(12 * MIB))

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ObjectStoreError, match=r"cannot upload shard: .*Input/output error"):
        await bucket.objects.upload("shard", path)
    monkeypatch.undo()
    assert await bucket.unfinished() == []


async def test_a_folder_keeps_nothing_of_a_cancelled_upload(tmp_path: Path) -> None:
    store = connect((tmp_path / "store").as_uri(), {})

    def files() -> list[Path]:
        return [p for p in (tmp_path / "store").rglob("*") if p.is_file()]

    with trickle(tmp_path / "slow", 11 * MIB):
        sending = asyncio.ensure_future(multipart.upload(store, keys.upload("x"), tmp_path / "slow", 32 * MIB))
        await asyncio.to_thread(until, lambda: files() != [], "a part lies there")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.to_thread(until, lambda: files() == [], "nothing lies there")
