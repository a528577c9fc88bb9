"""Blob store as the trainer uses it: whole objects by key below `<installation>/`, never a pickle."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.store import ObjectStore, from_url

from trainer.contract.documents import READER
from trainer.objectstore import multipart

SMALL_TIMEOUT_S = 20.0
LARGE_TIMEOUT_S = 3600.0
CHUNK = 4 << 20


class ObjectStoreError(Exception):
    """The store did not do what was requested; a later call may succeed."""


class BadContent(Exception):
    """An object exists, but its size or hash is wrong."""


def connect(url: str, options: Mapping[str, str], *, make_folder: bool = True) -> ObjectStore:
    """Return a store by URL (file, s3, gs, az, ...). `make_folder`: create a missing folder of a file URL.

    Raises: ObjectStoreError naming the URL if it cannot be created.
    """
    retry: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=SMALL_TIMEOUT_S)}
    try:
        if url.startswith("file:"):
            return from_url(url, mkdir=make_folder, automatic_cleanup=True)  # no folders without a file
        where = [v for k, v in options.items() if "endpoint" in k.lower() or "base_url" in k.lower()]
        plain = any(v.startswith("http://") for v in where)
        client: Any = {"allow_http": plain}
        return from_url(  # type: ignore[call-overload, no-any-return]
            url, config=dict(options), client_options=client, retry_config=retry
        )
    except (BaseError, ValueError, OSError) as e:
        raise ObjectStoreError(f"GPUBROKER_BLOBS {url!r}: {_line(e)}; give a URL such as s3://bucket/prefix") from None


class Objects:
    """Client for the objects below `<installation>/`; counts traffic and records when the store last answered."""

    def __init__(self, store: ObjectStore | None, installation: str, *, folder_url: str = "") -> None:
        """Create a client of `store`, or of the folder at `folder_url` once it exists."""
        self._stores = None if store is None else (store, store)
        """Stores for writing and for reading; None: the folder did not exist yet."""
        self._folder_url = folder_url
        self._prefix = f"{installation}/"
        self.answered_at = time.monotonic()
        self.sent_bytes = 0
        """Bytes of content sent; failed uploads count too, because they are billed."""
        self.received_bytes = 0

    @classmethod
    def open(cls, url: str, options: Mapping[str, str], installation: str) -> Self:
        """Open a store by URL and a grant's options. Raises: ObjectStoreError.

        The folder of a file URL is not created, because an empty second store would look like one without a broker. All
        operations fail until the folder exists.
        """
        if url.startswith("file:"):
            return cls(None, installation, folder_url=url)
        opened = cls(None, installation)
        opened.renew(url, options)
        return opened

    def renew(self, url: str, options: Mapping[str, str]) -> None:
        """Use renewed credentials of the same place from the next call on. Raises: ObjectStoreError."""
        if not self._folder_url:
            self._stores = _pair(url, options)

    def _usable(self) -> tuple[ObjectStore, ObjectStore]:
        """Return the stores for writing and for reading. Raises: OSError if the folder of the store is missing."""
        if self._folder_url and not (root := _folder(self._folder_url)).is_dir():
            raise OSError(f"the store's folder {root} is missing; mount it or put it back, it is not created here")
        if self._stores is None:
            self._stores = _pair(self._folder_url, {})
        return self._stores

    async def read(self, key: str) -> bytes | None:
        """Return the object's content, or None if it does not exist. Raises: ObjectStoreError."""
        try:
            _, reader = self._usable()
            async with asyncio.timeout(SMALL_TIMEOUT_S):
                result = await obstore.get_async(reader, self._prefix + key)
                data = bytes(await result.bytes_async())
        except FileNotFoundError:
            self._note_answer()
            return None
        except PermissionDeniedError as e:
            if await self._absent(key):
                return None
            raise ObjectStoreError(f"cannot read {key}: {_line(e)}") from None
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot read {key}: {_line(e)}") from None
        self._note_answer()
        self.received_bytes += len(data)
        return data

    async def write(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one. Raises: ObjectStoreError."""
        self.sent_bytes += len(data)
        try:
            writer, _ = self._usable()
            async with asyncio.timeout(SMALL_TIMEOUT_S):
                await obstore.put_async(writer, self._prefix + key, data)
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot write {key}: {_line(e)}") from None
        self._note_answer()

    async def create(self, key: str, data: bytes) -> bool:
        """Write the object if it is absent; return True if it now holds `data`.

        A retry after a lost reply finds the object of the first try, so an existing object with equal content counts as
        success.

        Raises: ObjectStoreError.
        """
        self.sent_bytes += len(data)
        try:
            writer, _ = self._usable()
            async with asyncio.timeout(SMALL_TIMEOUT_S):
                await obstore.put_async(writer, self._prefix + key, data, mode="create")
        except AlreadyExistsError:
            return await self.read(key) == data
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot create {key}: {_line(e)}") from None
        self._note_answer()
        return True

    async def upload(self, key: str, path: Path, sent: Callable[[int], None] = lambda count: None) -> None:
        """Upload a file, in parts if it is large; `sent` receives the bytes since its previous call.

        Raises: ObjectStoreError.
        """
        try:
            size = path.stat().st_size
            self.sent_bytes += size
            async with asyncio.timeout(LARGE_TIMEOUT_S):
                writer, _ = self._usable()
                if size <= multipart.PART:
                    await obstore.put_async(writer, self._prefix + key, path)
                    sent(size)
                else:
                    await multipart.upload(writer, self._prefix + key, path, size, sent)
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot upload {key}: {_line(e)}") from None
        self._note_answer()

    async def download(self, key: str, path: Path, *, size: int, sha256: str) -> None:
        """Stream an object to a file.

        Raises: BadContent if the object is absent, has another size or hash, or the key is invalid; no file is left.
        Raises: ObjectStoreError.
        """
        digest, received = hashlib.sha256(), 0
        try:
            _, reader = self._usable()
            path.parent.mkdir(parents=True, exist_ok=True)
            async with asyncio.timeout(LARGE_TIMEOUT_S):
                result = await obstore.get_async(reader, self._prefix + key)
                with path.open("wb") as file:
                    async for piece in result.stream(min_chunk_size=CHUNK):
                        received += len(piece)
                        self.received_bytes += len(piece)
                        if received > size:
                            break
                        await asyncio.to_thread(digest.update, piece)
                        file.write(piece)
        except FileNotFoundError:
            raise BadContent(f"{key} is absent") from None
        except PermissionDeniedError as e:
            if await self._absent(key):
                raise BadContent(f"{key} is absent") from None
            raise ObjectStoreError(f"cannot download {key}: {_line(e)}") from None
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot download {key}: {_line(e)}") from None
        except ValueError:  # from obstore and the file system: an empty segment, a control character
            raise BadContent(f"{key!r} can be no object's key") from None
        self._note_answer()
        if received != size or digest.hexdigest() != sha256:
            path.unlink()
            raise BadContent(f"{key} is not the {size} bytes with sha256 {sha256[:12]}... that were promised")

    async def keys(self, prefix: str) -> list[str]:
        """Return every key below `prefix` (which ends in `/`), sorted. Raises: ObjectStoreError."""
        return sorted(await self.sizes(prefix))

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of every object below `prefix` (which ends in `/`) by key. Raises: ObjectStoreError."""
        sizes: dict[str, int] = {}
        try:
            _, reader = self._usable()
            async with asyncio.timeout(SMALL_TIMEOUT_S * 3):
                async for batch in obstore.list(reader, self._prefix + prefix):
                    sizes |= {meta["path"].removeprefix(self._prefix): meta["size"] for meta in batch}
        except FileNotFoundError:
            return {}
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot list {prefix}: {_line(e)}") from None
        self._note_answer()
        return sizes

    async def delete(self, key: str) -> None:
        """Delete an object; an absent object is not an error. Raises: ObjectStoreError."""
        try:
            writer, _ = self._usable()
            async with asyncio.timeout(SMALL_TIMEOUT_S):
                await obstore.delete_async(writer, self._prefix + key)
        except FileNotFoundError:
            return
        except (BaseError, OSError, TimeoutError) as e:
            raise ObjectStoreError(f"cannot delete {key}: {_line(e)}") from None
        self._note_answer()

    async def _absent(self, key: str) -> bool:
        """Return True if a listing of the object's folder lacks it.

        S3 and GCS answer "forbidden" for an absent object if the credentials may list only its folder.
        """
        try:
            _, reader = self._usable()
            async with asyncio.timeout(SMALL_TIMEOUT_S):
                folder = self._prefix + key.rpartition("/")[0]
                listed = await obstore.list_with_delimiter_async(reader, folder)
        except (BaseError, OSError, TimeoutError):
            return False
        self._note_answer()
        return all(meta["path"] != self._prefix + key for meta in listed["objects"])

    def _note_answer(self) -> None:
        self.answered_at = time.monotonic()


def _folder(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _pair(url: str, options: Mapping[str, str]) -> tuple[ObjectStore, ObjectStore]:
    """Return the stores for writing and for reading."""
    own = {name: value for name, value in options.items() if not name.startswith(READER)}
    reading = {name.removeprefix(READER): value for name, value in options.items() if name.startswith(READER)}
    store = connect(url, own, make_folder=False)
    return store, connect(url, {**own, **reading}) if reading else store


def _line(error: BaseException) -> str:
    """Return the first line of an error, since obstore appends a debug dump of many lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
