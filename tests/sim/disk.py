"""Deterministic replacement, without threads, of the obstore calls and disks that the trainer's checkpoint code uses.

`trainers` installs the replacement while a simulation runs."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from obstore.exceptions import AlreadyExistsError

from broker.domain.errors import AlreadyExists, BlobError
from broker.ports import Blobs

WEIGHTS = "weights"


class Died(Exception):
    """Raised in an agent whose machine is gone."""


def weights(job: str, step: int) -> bytes:
    """Return the weights of a job after `step` steps, each taken once and in order."""
    return f"{job}:{step}".encode()


def trained(before: bytes, job: str, since: int, to: int) -> bytes:
    """Return the weights after the steps from `since` to `to`. Wrong weights at `since` give wrong weights."""
    return weights(job, to) if before == weights(job, since) else before + f" and {job}:{since}..{to}".encode()


class Folder:
    """A machine's folder with the part of `Path` that checkpoints use: a real disk would dominate the run time."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def __truediv__(self, name: object) -> "_File":
        return _File(self, str(name))

    def rglob(self, _: str) -> list["_File"]:
        return [_File(self, name) for name in self.files]

    def mkdir(self, **_: bool) -> None:
        """Do nothing: the simulation has no folders."""


class _File:
    def __init__(self, folder: Folder, name: str) -> None:
        self.parent, self._name = folder, name

    def __lt__(self, other: "_File") -> bool:
        return self._name < other._name

    def relative_to(self, _: Folder) -> PurePosixPath:
        return PurePosixPath(self._name)

    def is_file(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self.read_bytes()))

    def read_bytes(self) -> bytes:
        return self.parent.files[self._name]

    @contextmanager
    def open(self, mode: str) -> Iterator[BytesIO]:
        file = BytesIO(self.read_bytes() if mode == "rb" else b"")
        yield file
        if mode == "wb":
            self.parent.files[self._name] = file.getvalue()

    def unlink(self) -> None:
        del self.parent.files[self._name]


def _empty(folder: Folder, *, ignore_errors: bool) -> None:
    folder.files.clear()


@dataclass(frozen=True, kw_only=True)
class Line:
    """Connection to the store. `survives`: called with the key before and after every call; raises Died."""

    blobs: Blobs
    survives: Callable[[str], None]


class _Got:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def bytes_async(self) -> bytes:
        return self._data

    async def stream(self, *, min_chunk_size: int) -> AsyncIterator[bytes]:
        yield self._data


class _Obstore:
    """Store whose keys are below `<installation>/`; the simulation has one installation."""

    async def get_async(self, line: Line, key: str) -> _Got:
        line.survives("")
        try:
            data = await line.blobs.get(key.partition("/")[2])
        except BlobError as e:
            raise OSError(str(e)) from None
        if data is None:
            raise FileNotFoundError(key)
        return _Got(data)

    async def put_async(self, line: Line, key: str, data: bytes | _File, mode: str = "overwrite") -> None:
        line.survives("")
        content = data.read_bytes() if isinstance(data, _File) else data
        try:
            await line.blobs.put(key.partition("/")[2], content, if_absent=mode == "create")
        except AlreadyExists as e:
            raise AlreadyExistsError(str(e)) from None
        except BlobError as e:
            raise OSError(str(e)) from None
        line.survives(key)

    async def list(self, line: Line, prefix: str) -> AsyncIterator[list[dict[str, Any]]]:
        line.survives("")
        installation, _, below = prefix.partition("/")
        try:
            listed = await line.blobs.list(below)
            yield [{"path": f"{installation}/{blob.key}", "size": blob.bytes} for blob in listed]
        except BlobError as e:
            raise OSError(str(e)) from None

    async def delete_async(self, line: Line, key: str) -> None:
        line.survives("")
        try:
            await line.blobs.delete(key.partition("/")[2])
        except BlobError as e:
            raise OSError(str(e)) from None


@contextmanager
def trainers(clock: Callable[[], float]) -> Iterator[None]:
    """Replace the trainers' store, disks, clock and nonces by those of the simulation. `clock`: virtual seconds."""
    numbers = iter(range(1 << 32))

    def nonce(length: int) -> str:
        return f"{next(numbers):0{2 * length}x}"

    replaced: dict[str, Any] = {
        "trainer.objectstore.objects.obstore": _Obstore(),
        "trainer.objectstore.objects.time": SimpleNamespace(monotonic=clock),
        "trainer.checkpoint.protocol.shutil": SimpleNamespace(rmtree=_empty),
        "trainer.checkpoint.protocol.time": SimpleNamespace(monotonic=clock),
        "trainer.checkpoint.protocol.secrets": SimpleNamespace(token_hex=nonce),
    }
    with ExitStack() as stack:
        for target, new in replaced.items():
            stack.enter_context(patch(target, new))
        yield
