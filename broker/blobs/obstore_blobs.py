"""`ports.Blobs` over obstore."""

import asyncio
import builtins
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import HTTPStore, LocalStore, MemoryStore, ObjectStore

from broker.blobs.connect import CALL_S, connect, folder_of, one_line, options_of
from broker.blobs.credentials.base import Issuer
from broker.blobs.credentials.issuers import GrantSettings, issuer_of, unscoped_warning, without_credentials
from broker.blobs.credentials.scope import Scope
from broker.blobs.folder_listing import list_folder
from broker.blobs.store_listing import LimitedListing, ListingLimits, list_all, list_store
from broker.domain.blob_url import scheme_of
from broker.domain.errors import AlreadyExists, BlobError, BlobsUnavailable, BlobTooLarge
from broker.domain.ids import AttemptId, Installation, JobId
from broker.ports import BlobInfo, StoreAccess
from broker.ports.blobs import DOCUMENT_BYTES

if TYPE_CHECKING:
    from obstore import GetOptions

T = TypeVar("T")
SLOWEST = 1 << 20
"""Lowest upload rate in bytes a second; a slower upload is aborted."""
PARTS_AT_ONCE = 4
"""Parts of 5 MiB that are uploaded concurrently, each held in memory."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")


class ObstoreBlobs:
    """Objects below `<url>/<installation>/`.

    An object in a folder is written to a temporary file and renamed, so no reader gets a partial object. If the reply
    to a remote `put(if_absent=True)` is lost, the retry raises AlreadyExists because of its own first try. A caller
    that must distinguish the two cases compares the content.
    """

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        installation: Installation,
        options: Mapping[str, str],
        issuer: Issuer | str,
    ) -> None:
        """Keep the store. `issuer`: issues the credentials of attempts; a string is the reason why there is none."""
        self._store = store
        self._issuer = issuer
        self._url = url
        self._prefix = f"{installation}/"
        self._options = dict(options)
        self._folder = folder_of(url)

    @classmethod
    def open(
        cls,
        url: str,
        installation: Installation,
        *,
        options: Mapping[str, str] | None = None,
        grants: GrantSettings | None = None,
    ) -> Self:
        """Open a store without sending a request; a missing folder is created. Raises InvalidInput.

        `url`: file:///folder, memory://, s3://bucket/prefix, gs://..., az://...; `options`: obstore's settings.
        """
        settled = options_of(url, options)
        store = connect(url, settled)
        return cls(store, url, installation, settled, issuer_of(url, settled, grants or GrantSettings()))

    @property
    def local(self) -> bool:
        return scheme_of(self._url) in ("file", "memory")

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        self._check_folder(key)
        mode: Literal["create", "overwrite"] = "create" if if_absent else "overwrite"
        result = await self._call("write", key, obstore.put_async(self._store, self._prefix + key, data, mode=mode))
        return result["e_tag"] or ""

    async def put_file(self, key: str, path: Path) -> None:
        self._check_folder(key)
        within_s = CALL_S + path.stat().st_size / SLOWEST
        sent = obstore.put_async(self._store, self._prefix + key, path, max_concurrency=PARTS_AT_ONCE)
        await self._call("write", key, sent, within_s)

    async def get(self, key: str, *, max_bytes: int = DOCUMENT_BYTES) -> bytes | None:
        try:
            return await self._call("read", key, self._read(key, max_bytes))
        except FileNotFoundError:
            return None

    async def get_range(self, key: str, start: int, size: int) -> bytes | None:
        try:
            return await self._call("read", key, self._read(key, size, {"range": (start, start + size)}))
        except FileNotFoundError:
            return None
        except BlobsUnavailable:  # stores refuse a range that begins at or after the object's end
            with contextlib.suppress(FileNotFoundError):
                if await self._call("read", key, self._size(key)) <= start:
                    return b""
            raise

    async def list(
        self, prefix: str, *, max_objects: int | None = None, max_per_folder: int | None = None
    ) -> Sequence[BlobInfo]:
        """Return the objects below a prefix in key order. The prefix is empty or ends in `/`, as stores require."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} does not end in '/'")
        try:
            return await self._call("list", prefix, self._list(prefix, ListingLimits(max_objects, max_per_folder)))
        except FileNotFoundError as e:
            raise BlobsUnavailable(f"cannot list {prefix} at {self._url}: {one_line(e)}") from None

    async def folders(self, prefix: str) -> frozenset[str]:
        """Return the next part of every key below a prefix that ends in `/`."""
        if not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} does not end in '/'")
        listing = obstore.list_with_delimiter_async(self._store, self._prefix + prefix)
        try:
            names = (await self._call("list", prefix, listing))["common_prefixes"]
        except FileNotFoundError as e:
            raise BlobsUnavailable(f"cannot list {prefix} at {self._url}: {one_line(e)}") from None
        return frozenset(name.rstrip("/").rpartition("/")[2] for name in names)

    async def delete(self, key: str) -> None:
        try:
            await self._call("delete", key, obstore.delete_async(self._store, self._prefix + key))
        except FileNotFoundError:
            return

    async def copy(self, source: str, target: str) -> None:
        """Copy an object on the server if the store can. Raises BlobError if `source` is absent."""
        self._check_folder(target)
        try:
            await self._call(
                "copy", source, obstore.copy_async(self._store, self._prefix + source, self._prefix + target)
            )
        except FileNotFoundError:
            raise BlobError(f"cannot copy {source}: it is absent; upload it again") from None

    @property
    def scopes(self) -> bool:
        return not isinstance(self._issuer, str) and self._issuer.scoped

    @property
    def unscoped(self) -> str | None:
        """Return the warning of `doctor`; None: there is none."""
        return unscoped_warning(self._url, self._issuer)

    async def grant(self, job: JobId, attempt: AttemptId, *, origin: JobId | None = None) -> StoreAccess:
        """Return the access of a machine to its own objects. Raises BlobsUnavailable.

        A folder is reached by its URL alone. memory:// exists in this process only, so only virtual
        machines can use it. A store without an issuer hands out the broker's own options.
        """
        if isinstance(self._issuer, str):
            return StoreAccess(url=self._url, options={} if self.local else dict(self._options))
        parts = urlsplit(self._url)
        root = "/".join([*filter(None, [parts.path.strip("/")]), self._prefix])
        scope = Scope(bucket=parts.netloc, root=root, job=job, attempt=attempt, origin=origin)
        issued = await self._issuer.issue(scope)
        options = without_credentials(self._options) | dict(issued.options)
        return StoreAccess(url=self._url, options=options, scoped=self._issuer.scoped, expires_at=issued.expires_at)

    async def sign(self, key: str, *, for_s: float) -> str:
        """Return a signed URL. Raises BlobError for a folder or memory://, and for credentials that cannot sign."""
        if isinstance(self._store, LocalStore | MemoryStore | HTTPStore):
            raise BlobError(f"cannot sign {key}: {self._url} has no signed URLs; use s3://, gs:// or az://")
        try:
            return await obstore.sign_async(self._store, "GET", self._prefix + key, timedelta(seconds=for_s))
        except BaseError as e:
            raise BlobError(f"cannot sign {key} at {self._url}: {one_line(e)}") from None

    async def _read(self, key: str, max_bytes: int, options: "GetOptions | None" = None) -> bytes:
        """Return the bytes. The size is that of the response's header, so a larger body is not received."""
        result = await obstore.get_async(self._store, self._prefix + key, options=options)
        start, end = result.range
        if end - start > max_bytes:
            raise BlobTooLarge(f"{key} has {end - start} bytes, more than the {max_bytes} that are read")
        return bytes(await result.bytes_async())

    async def _size(self, key: str) -> int:
        return (await obstore.head_async(self._store, self._prefix + key))["size"]

    async def _list(self, prefix: str, limits: ListingLimits) -> builtins.list[BlobInfo]:
        try:
            return await list_store(self._store, self._prefix, LimitedListing(prefix, limits))
        except FileNotFoundError:
            raise
        except BaseError:
            if self._folder is None or not self._folder.is_dir():
                raise
            objects = list_folder(self._folder / self._prefix, prefix)
            return await asyncio.to_thread(list_all, objects, LimitedListing(prefix, limits))

    async def _call(self, verb: str, key: str, call: Awaitable[T], within_s: float = CALL_S) -> T:
        """Return the result of `call`. Raises AlreadyExists or BlobsUnavailable.

        Raises FileNotFoundError if only the object is absent; an absent store is BlobsUnavailable.
        """
        try:
            async with asyncio.timeout(within_s):
                return await call
        except AlreadyExistsError:
            raise AlreadyExists(f"{key} exists already") from None
        except FileNotFoundError as e:
            if self._whole_store_missing(e):
                raise BlobsUnavailable(
                    f"cannot {verb} {key}: {self._url} is not there; run `gpubroker blobs init {self._url}`"
                ) from None
            raise
        except TimeoutError:
            raise BlobsUnavailable(f"cannot {verb} {key}: {self._url} did not answer in {within_s:.0f} s") from None
        except (BaseError, OSError) as e:
            raise BlobsUnavailable(f"cannot {verb} {key} at {self._url}: {one_line(e)}") from None

    def _check_folder(self, key: str) -> None:
        """Raise BlobsUnavailable if the store's folder is missing, because a write would create it."""
        if self._folder is not None and not self._folder.is_dir():
            raise BlobsUnavailable(
                f"cannot write {key}: {self._folder} is missing; mount it or put it back, it is not created here"
            )

    def _whole_store_missing(self, error: FileNotFoundError) -> bool:
        if self._folder is not None:
            return not self._folder.is_dir()
        return any(sign in str(error) for sign in _NO_BUCKET)
