"""Temporary files of running uploads below the daemon's home, so that no upload is held in memory.

`sweep` removes files that a killed daemon left.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from broker.api.core.problems import StorageFull, TooLarge
from broker.runtime.private_files import FULL, private_folder

T = TypeVar("T")
WRITE_BYTES = 1 << 20
KEPT_FREE_BYTES = 64 << 20
"""Bytes of the disk that stay free, because the database may share it."""
UNFINISHED_S = 3600.0
"""Age in seconds after which an unfinished file of the blob store is removed."""
SPOOL_NAME = re.compile(r"[0-9a-f]{32}")
"""Names of the temporary files."""
IMPORT_PREFIX = "import-"
"""Start of the names of folders in which the daemon packs imports."""


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """A complete temporary file, which exists until `spooled` exits."""

    path: Path
    bytes: int
    sha256: str


def sweep(folder: Path) -> None:
    """Remove uploads that an earlier daemon left, and no other files. Only one daemon uses a home."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if SPOOL_NAME.fullmatch(path.name):
                path.unlink()
            elif path.name.startswith(IMPORT_PREFIX) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
        folder.rmdir()


def sweep_unfinished(folder: Path) -> None:
    """Remove unfinished files that a killed daemon left in a folder used as blob store. No listing shows them.

    Files of the last hour stay, because another broker may still be writing them.
    """
    for path in folder.glob("*#*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()


@asynccontextmanager
async def spooled(folder: Path, body: AsyncIterable[bytes], *, max_bytes: int) -> AsyncGenerator[Spooled]:
    """Store the body in a temporary file of at most `max_bytes` bytes.

    Raises TooLarge, StorageFull, and errors of `body`.
    """
    path = folder / secrets.token_hex(16)
    try:
        with full_disk_refused(folder):
            private_folder(folder)
            file = await _spool(path, body, max_bytes)
        yield file
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


async def _spool(path: Path, body: AsyncIterable[bytes], max_bytes: int) -> Spooled:
    digest, size, buffered = hashlib.sha256(), 0, bytearray()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 0) as file:

        def write() -> None:
            if shutil.disk_usage(path.parent).free < KEPT_FREE_BYTES + len(buffered):
                raise OSError(errno.ENOSPC, "")
            digest.update(buffered)
            rest = memoryview(buffered)
            while rest:
                rest = rest[file.write(rest) or 0 :]

        async for chunk in body:
            size += len(chunk)
            if size > max_bytes:
                raise TooLarge(
                    f"the file has more than {max_bytes} bytes; send less, or raise upload_max_bytes of the daemon"
                )
            buffered += chunk
            if len(buffered) >= WRITE_BYTES:
                await run_to_end(write)
                buffered = bytearray()
        await run_to_end(write)
    return Spooled(path=path, bytes=size, sha256=digest.hexdigest())


async def run_to_end(call: Callable[[], T]) -> T:
    """Run a call in a thread to its end, even if this task is cancelled, because the call still uses the open file."""
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


@contextlib.contextmanager
def full_disk_refused(folder: Path) -> Iterator[None]:
    """Raise StorageFull for an OSError in the block which means that the disk of `folder` takes no more data."""
    try:
        yield
    except OSError as e:
        if e.errno not in FULL:
            raise
        raise _disk_full(folder) from None


def check_disk_space(folder: Path, size: int) -> None:
    """Raise StorageFull if writing `size` bytes below `folder` would leave too little disk for the database."""
    if _free(folder) < KEPT_FREE_BYTES + size:
        raise _disk_full(folder)


def _free(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _disk_full(folder: Path) -> StorageFull:
    free, reserved = _free(folder) >> 20, KEPT_FREE_BYTES >> 20
    return StorageFull(
        f"the daemon's disk has {free} MiB free, and keeps {reserved} MiB for its database; "
        "send less, or free space for the daemon, then send it again"
    )
