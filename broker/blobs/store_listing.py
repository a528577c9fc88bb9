"""Listing of a blob store with limits, because a host may write very many objects below its own prefixes."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import obstore
from obstore.store import GCSStore, ObjectStore, S3Store

from broker.ports import BlobInfo

log = logging.getLogger(__name__)
SEEKABLE = (S3Store, GCSStore)
"""Stores that list in key order and start a listing after a key without reading the keys before it."""
PAGE = 1000


@dataclass(frozen=True)
class ListingLimits:
    """Limits of a listing; None: no limit."""

    objects: int | None = None
    per_folder: int | None = None
    """Maximum objects of each folder directly below the prefix; more are skipped."""


@dataclass
class LimitedListing:
    """Objects below a prefix, up to the limits. Keys that are added are relative to the installation."""

    prefix: str
    limits: ListingLimits
    objects: list[BlobInfo] = field(default_factory=list)
    _by_folder: Counter[str] = field(default_factory=Counter)

    def add(self, info: BlobInfo) -> str | None:
        """Keep an object within the limits. Return the folder of an object that is beyond its folder's limit."""
        folder, slash, _ = info.key.removeprefix(self.prefix).partition("/")
        self._by_folder[folder if slash else ""] += 1
        if self.limits.per_folder is not None and slash and self._by_folder[folder] > self.limits.per_folder:
            return folder
        self.objects.append(info)
        return None

    @property
    def is_full(self) -> bool:
        """True if the listing has as many objects as it may."""
        return self.limits.objects is not None and len(self.objects) >= self.limits.objects

    def result(self) -> list[BlobInfo]:
        """Return the objects in key order."""
        if self.is_full:
            log.warning("%s has %d objects or more; the rest is not read", self.prefix, len(self.objects))
        return sorted(self.objects, key=lambda info: info.key)


async def list_store(store: ObjectStore, root: str, listing: LimitedListing) -> list[BlobInfo]:
    """Return the objects below `<root><prefix>`. `root`: prefix of the installation, which keys do not contain."""
    offset: str | None = None
    while True:
        skipped = await _list_from(store, root, listing, offset)
        if skipped is None:
            return listing.result()
        offset = f"{root}{listing.prefix}{skipped}0"  # 0 follows / in ASCII: the next key is outside of the folder.


async def _list_from(store: ObjectStore, root: str, listing: LimitedListing, offset: str | None) -> str | None:
    """Read pages until the end, a full listing, or a folder beyond its limit, which is returned."""
    async for page in obstore.list(store, prefix=root + listing.prefix, offset=offset, chunk_size=PAGE):
        for meta in page:
            etag, written_at = meta["e_tag"] or "", meta["last_modified"]
            key = meta["path"].removeprefix(root)
            full_folder = listing.add(BlobInfo(key=key, bytes=meta["size"], etag=etag, written_at=written_at))
            if full_folder is not None and isinstance(store, SEEKABLE):
                return full_folder
            if listing.is_full:
                return None
    return None


def list_all(objects: Iterator[BlobInfo], listing: LimitedListing) -> list[BlobInfo]:
    """Return the objects of an iterator up to the limits."""
    for info in objects:
        listing.add(info)
        if listing.is_full:
            break
    return listing.result()
