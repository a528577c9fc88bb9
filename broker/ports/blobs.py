"""Protocol of the blob store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from broker.domain.ids import AttemptId, JobId


@dataclass(frozen=True, kw_only=True)
class BlobInfo:
    """One object of the blob store."""

    key: str
    bytes: int
    etag: str
    """Changes with every write; compare it, never parse it."""
    written_at: datetime | None = field(default=None, compare=False)
    """Time of the latest write by the store's clock; None: the store does not report it."""


DOCUMENT_BYTES = 1 << 20
"""Default of `Blobs.get`: largest object in bytes that is read. Documents of the broker are far smaller."""


MAX_LISTED = 50_000
"""Maximum objects of a listing below a prefix that a host can write; 50 pages of a bucket."""


class Blobs(Protocol):
    """Object store shared by broker and machines.

    Keys are relative to the installation. Every method raises BlobsUnavailable when the store cannot be reached.
    """

    @property
    def local(self) -> bool:
        """True for a folder or memory, which only this machine reaches."""
        ...

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write an object and return its e_tag. Raises AlreadyExists if `if_absent` is set and the object exists."""
        ...

    async def put_file(self, key: str, path: Path) -> None:
        """Write a file's bytes with little memory; the object appears once all bytes are written."""
        ...

    async def get(self, key: str, *, max_bytes: int = DOCUMENT_BYTES) -> bytes | None:
        """Return the object's bytes; None when it is absent.

        Raises BlobTooLarge, without reading the object, if it has more than `max_bytes` bytes.
        """
        ...

    async def get_range(self, key: str, start: int, size: int) -> bytes | None:
        """Return at most `size` bytes from `start` on; None when the object is absent.

        Fewer bytes are returned at the object's end, and none past it.
        """
        ...

    async def list(
        self, prefix: str, *, max_objects: int | None = None, max_per_folder: int | None = None
    ) -> Sequence[BlobInfo]:
        """Return the objects below a prefix, in key order.

        `max_objects`: number of objects after which the listing ends; `max_per_folder`: number of objects after which
        the rest of a folder directly below the prefix is skipped. A host may write very many objects below its own
        prefixes.
        """
        ...

    async def folders(self, prefix: str) -> frozenset[str]:
        """Return the next part of every key below a prefix that ends in `/`, without the objects of each part."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; an absent object is not an error."""
        ...

    async def copy(self, source: str, target: str) -> None:
        """Copy an object, on the server's side if the store supports it."""
        ...

    @property
    def scopes(self) -> bool:
        """True when `grant` limits its credentials to the attempt's own keys."""
        ...

    async def grant(self, job: JobId, attempt: AttemptId, *, origin: JobId | None = None) -> "StoreAccess":
        """Return the credentials with which an attempt's machines reach its keys. Raises BlobsUnavailable.

        The broker renews the credentials before `expires_at`. `origin`: the job whose checkpoints this job starts from;
        the credentials can read these checkpoints too.
        """
        ...

    async def sign(self, key: str, *, for_s: float) -> str:
        """Return a URL that reads one object for `for_s` seconds.

        Raises BlobError where the store has no signed URLs (a folder).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    """URL and credentials of a blob store."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Credentials and settings for obstore. Send them only sealed, or as secret environment."""
    scoped: bool = False
    """True when the credentials reach no more than the attempt's own keys."""
    expires_at: datetime | None = None
    """Expiry of the credentials; None: they do not expire."""
