"""Reads data sets from the Hub and from allowed HTTPS hosts. No address of a private network can be reached.

A host of the allow-list must have a public address, which is checked on the address that the socket connects to. An
entry with a scheme, such as `https://data.internal:8443`, names a host of the operator's own with any address.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote, unquote

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from broker.domain.errors import InvalidInput, Problem
from broker.runtime.network.address_guard import NOT_PUBLIC, public_socket
from trainer.dataset.name_patterns import BadPattern, NamePattern
from trainer.dataset.prompts import DataError
from trainer.dataset.sources import DATASET, DATASETS, default_files

FIELD = "source"
HUB = "https://huggingface.co"
HOSTS = ("huggingface.co", "*.huggingface.co", "*.hf.co")
"""Hosts of the Hub and of the storage to which it redirects."""
REDIRECTS = 5
CONNECT_S = 10.0
STALLED_S = 30.0
"""Seconds without data after which a source is given up."""
LISTING_BYTES = 16 << 20
"""Maximum bytes of a listing of the Hub."""
PIECE_BYTES = 1 << 16
FILES = 1000
"""Maximum number of files of one data set."""
IDENTITY = "identity"
"""The only encoding that is asked for and accepted: the daemon inflates nothing on its event loop."""
REDIRECTED = frozenset({301, 302, 303, 307, 308})
HTTP_OK = 200
HIDDEN = frozenset({401, 403, 404})
"""Statuses of a data set that does not exist or that is not public."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a data set."""

    name: str
    """Path within the data set."""
    url: URL


def refused(message: str) -> InvalidInput:
    return InvalidInput(Problem(field=FIELD, message=message))


class DataFetcher:
    """Client for data sets. `hosts`: allowed in addition to the Hub's; `*.example.org` allows all names below."""

    def __init__(self, hosts: Sequence[str] = (), hub: str = HUB, *, resolver: AbstractResolver | None = None) -> None:
        self._resolver = resolver
        self._hub = URL(hub)
        own = [URL(entry).origin() for entry in (hub, *hosts) if "://" in entry and entry != HUB]
        self._own = frozenset(own)
        self._public: Collection[str] = [*HOSTS, *(entry.lower() for entry in hosts if "://" not in entry)]

    async def files(self, source: str) -> list[RemoteFile]:
        """Return the files of a data set: of `hf://datasets/OWNER/NAME[@REV][/PATTERN]`, or of a URL.

        Raises InvalidInput.
        """
        if not source.startswith(DATASETS):
            url = self._checked(source)
            name = re.sub(r"[/\\\x00-\x1f\x7f]", "_", unquote(url.name)) or "data"
            return [RemoteFile(name=name[-255:], url=url)]
        parts = DATASET.fullmatch(source.removeprefix(DATASETS))
        if parts is None or {".", ".."} & set(parts["repo"].split("/")):
            raise refused(f"is not a data set of the Hub; write {DATASETS}owner/name, with @revision or /pattern")
        try:
            pattern = await asyncio.to_thread(NamePattern, parts["pattern"]) if parts["pattern"] else None
            names, commit = await self._listing(parts["repo"], parts["revision"] or "main")
            selected = await asyncio.to_thread(pattern.selected if pattern else default_files, names)
        except (BadPattern, DataError) as e:
            raise refused(str(e)) from None
        if not 0 < len(selected) <= FILES:
            what = "no file" if not selected else f"{len(selected)} files, at most {FILES}"
            raise refused(f"selects {what} of the Hub's data set; name one by /pattern")
        base = f"{self._hub}".rstrip("/") + f"/datasets/{parts['repo']}/resolve/{quote(commit, safe='')}/"
        return [RemoteFile(name=name, url=URL(base + quote(name), encoded=True)) for name in selected]

    async def _listing(self, repo: str, revision: str) -> tuple[list[str], str]:
        """Return (names of the files, commit) of a data set of the Hub. Raises InvalidInput."""
        path = f"/api/datasets/{repo}/revision/{quote(revision, safe='')}"
        async with self._opened(URL(f"{self._hub}".rstrip("/") + path, encoded=True)) as response:
            raw = bytearray()
            async for piece in _body_pieces(response):
                raw += piece
                if len(raw) > LISTING_BYTES:
                    raise refused("has a listing that is too long; name its file by a URL")
        return await asyncio.to_thread(_listed, bytes(raw))

    async def read(self, file: RemoteFile) -> AsyncGenerator[bytes]:
        """Yield the bytes of a file. Raises InvalidInput."""
        async with self._opened(file.url) as response:
            async for piece in _body_pieces(response):
                yield piece

    def _checked(self, text: str) -> URL:
        """Return an allowed URL. Raises InvalidInput."""
        try:
            url = URL(text)
            origin = url.origin() if url.host else None
        except ValueError:
            origin = None
        if origin is None or url.user is not None or url.password is not None:
            raise refused(f"is not an address of data; write https://host/file, or {DATASETS}owner/name")
        if origin in self._own:
            return url
        host = (url.host or "").lower()
        if url.scheme != "https" or url.port != 443:
            raise refused("must be an https URL without a port; upload the file instead")
        if not any(fnmatchcase(host, pattern) for pattern in self._public):
            raise refused(
                f"{host} is not among the daemon's data_hosts; upload the file, or ask the operator to add it"
            )
        return url

    @asynccontextmanager
    async def _opened(self, url: URL) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a URL, and check each address to which it redirects. Raises InvalidInput."""
        try:
            for _ in range(REDIRECTS + 1):
                async with self._session(url) as session, session.get(url, allow_redirects=False) as response:
                    if response.status not in REDIRECTED:
                        _check_status(response)
                        yield response
                        return
                    url = self._checked(str(url.join(URL(response.headers.get("Location", ""), encoded=True))))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if NOT_PUBLIC in str(getattr(error, "os_error", "")):
                raise refused(f"{url.host} has no public address") from None
            raise refused(f"{url.host} gave no usable answer; try again") from None
        raise refused(f"{url.host} redirects more than {REDIRECTS} times; give the last address")

    def _session(self, url: URL) -> aiohttp.ClientSession:
        factory = None if url.origin() in self._own else public_socket
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=self._resolver, socket_factory=factory, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALLED_S),
            headers={"User-Agent": "gpubroker", "Accept-Encoding": IDENTITY},
            auto_decompress=False,  # aiohttp would inflate on the event loop; a user may own the source
        )


def _listed(raw: bytes) -> tuple[list[str], str]:
    try:
        info = json.loads(raw)
        return [str(sibling["rfilename"]) for sibling in info["siblings"]], str(info["sha"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise refused("has no listing at the Hub; try again, or name its file by a URL") from None


def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status in HIDDEN:
        raise refused(f"{response.url.host} has no such public data (it answered {response.status}); check the address")
    if response.status != HTTP_OK:
        raise refused(f"{response.url.host} answered {response.status}; try again")
    encoding = response.headers.get("Content-Encoding", IDENTITY)
    if encoding.strip().lower() != IDENTITY:
        raise refused(f"{response.url.host} sends it compressed (Content-Encoding); store it plain, or upload it")


async def _body_pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        yield piece
