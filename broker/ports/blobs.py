"""The door to the blob store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from broker.domain.ids import AttemptId, JobId


@dataclass(frozen=True, kw_only=True)
class BlobInfo:
    key: str
    bytes: int
    etag: str
    """Changes with every write; compared, never parsed."""


class Blobs(Protocol):
    """The meeting place. Keys are relative to the installation. Raises BlobsUnavailable when nothing is known."""

    @property
    def local(self) -> bool:
        """True for a folder or memory: only this machine reaches it."""
        ...

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Writes and returns the e_tag. Raises AlreadyExists with `if_absent`."""
        ...

    async def put_file(self, key: str, path: Path) -> None:
        """Writes a file's bytes, a few of them in memory at a time; the object is there once all of them are."""
        ...

    async def get(self, key: str) -> bytes | None:
        """The object's bytes; None when it is absent."""
        ...

    async def get_range(self, key: str, start: int, size: int) -> bytes | None:
        """At most `size` bytes from `start` on: fewer where the object ends, none past its end. None: it is absent."""
        ...

    async def list(self, prefix: str) -> Sequence[BlobInfo]:
        """All objects below a prefix, in key order."""
        ...

    async def delete(self, key: str) -> None:
        """Absent is fine."""
        ...

    async def copy(self, source: str, target: str) -> None:
        """Server-side where the store can."""
        ...

    @property
    def scopes(self) -> bool:
        """True when `grant` limits what it hands out to the attempt's own part."""
        ...

    async def grant(self, job: JobId, attempt: AttemptId, *, origin: JobId | None = None) -> "StoreAccess":
        """What an instance is given to reach its own part; renewed before `expires_at`. Raises BlobsUnavailable.

        `origin`: the job whose checkpoints this one starts from, to be read as well.
        """
        ...

    async def sign(self, key: str, *, for_s: float) -> str:
        """A URL that reads one object for so long. Raises BlobError where the store has no such thing (a folder)."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Credentials and settings for obstore: handed over sealed or as secret environment."""
    scoped: bool = False
    """True when the credentials reach no more than the attempt's own part."""
    expires_at: datetime | None = None
    """None: they do not expire."""
