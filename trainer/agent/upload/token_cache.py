"""Token cache in the blob store, written once, so that later attempts need not tokenise.

The cache lies among the attempt's checkpoints and follows their protocol: pieces first, `manifest.json` last and only
if absent. Every byte is verified before use. After a failure the rows are tokenised again.
"""

import asyncio
import contextlib
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from trainer.agent.base.prepare import retry_while_unreachable
from trainer.agent.base.state import AgentState
from trainer.checkpoint.protocol import side_by_side
from trainer.contract import object_keys
from trainer.contract.documents import CONTRACT_VERSION, AttemptSpec, ManifestFile, TokenCacheManifest
from trainer.core import disk_space
from trainer.core.ipc import INDEX, NOTE, ROWS, rows_note
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError

FILES = (ROWS, INDEX, NOTE)
PIECE = 4 << 20
"""Bytes of a piece. A checkpoint waits for one piece at most, and a store accepts a piece in one request."""
AT_ONCE = 8
"""Pieces fetched concurrently."""
POLL_S = 0.5
RETRY_FOR_S = 60.0
"""Seconds that a fetch waits for the store; tokenising again takes minutes too."""
RETRY_S = 30.0
TRIES = 5
SPARE = 4
"""Multiple of the cache size that a folder store must have free, since checkpoints have priority."""
Log = Callable[[str], None]


async def fetch(objects: Objects, spec: AttemptSpec, folder: Path, log: Log) -> str:
    """Fetch a token cache of this job into the folder, and return its identity; empty: none."""
    try:
        for key, manifest in await retry_while_unreachable(lambda: _candidates(objects, spec, log), RETRY_FOR_S):
            try:
                await _fetch_pieces(objects, key, manifest, folder)
            except BadContent as e:
                log(f"tokenised rows {key} cannot be used: {e}")
                continue
            size = disk_space.format_bytes(sum(piece.bytes for piece in manifest.pieces))
            log(f"the tokenised rows of attempt {manifest.number} are fetched: {size}")
            return manifest.identity
    except (ObjectStoreError, OSError) as e:
        log(f"the tokenised rows in the store are not used: {e}")
    return ""


async def _candidates(objects: Objects, spec: AttemptSpec, log: Log) -> list[tuple[str, TokenCacheManifest]]:
    """Return token caches of this job's data, the last attempt's first. Raises: ObjectStoreError."""
    candidates: list[tuple[str, TokenCacheManifest]] = []
    for key in object_keys.token_cache_manifests(await objects.keys(object_keys.checkpoints(spec.job))):
        try:
            manifest = TokenCacheManifest.model_validate_json(await objects.read(key) or b"")
        except ValidationError:
            log(f"tokenised rows {key} cannot be used: the manifest cannot be read")
            continue
        data = spec.data.sha256 if spec.data else ""
        if manifest.version <= CONTRACT_VERSION and (manifest.job, manifest.data_sha256) == (spec.job, data):
            candidates.append((key, manifest))
    return sorted(candidates, key=lambda candidate: candidate[1].number, reverse=True)


async def _fetch_pieces(objects: Objects, key: str, manifest: TokenCacheManifest, folder: Path) -> None:
    """Fetch all pieces, or none. Raises: BadContent, ObjectStoreError, OSError."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="rows-") as temporary:
        temporary_folder = Path(temporary)
        for name in FILES:
            pieces = [piece for piece in manifest.pieces if piece.path.partition("/")[0] == name]
            await _join(objects, object_keys.files_prefix(key), pieces, temporary_folder / name)
        note = rows_note(temporary_folder)
        if note is None or note.get("identity") != manifest.identity:
            raise BadContent("its parts are of different caches")
        for name in FILES:  # the note last
            (temporary_folder / name).replace(folder / name)


async def _join(objects: Objects, source: str, pieces: list[ManifestFile], path: Path) -> None:
    path.touch()
    for begin in range(0, len(pieces), AT_ONCE):
        parts = [(piece, path.with_suffix(f".{n}")) for n, piece in enumerate(pieces[begin : begin + AT_ONCE])]
        await side_by_side([_download(objects, source + piece.path, at, piece) for piece, at in parts])
        for _, at in parts:
            await asyncio.to_thread(_append, path, at)


async def _download(objects: Objects, key: str, path: Path, piece: ManifestFile) -> None:
    """Fetch one piece. Raises: BadContent, ObjectStoreError."""
    await retry_while_unreachable(
        lambda: objects.download(key, path, size=piece.bytes, sha256=piece.sha256), RETRY_FOR_S
    )


def _append(path: Path, part: Path) -> None:
    with path.open("ab") as file, part.open("rb") as more:
        shutil.copyfileobj(more, file)
    part.unlink()


class Sender:
    """Uploader of this machine's token cache; it pauses while checkpoints wait to be sent."""

    def __init__(self, objects: Objects, state: AgentState, spec: AttemptSpec, *, known_cache: str, log: Log) -> None:
        """Prepare the upload. `known_cache`: identity of the fetched cache, which is not sent again; empty: none."""
        self._objects, self._state, self._spec, self._log = objects, state, spec, log
        self._nonce = secrets.token_hex(4)
        self._sent: list[ManifestFile] = []
        self._known, self._over = known_cache, state.env.node > 0 or not spec.token_cache_bytes

    async def run(self) -> None:
        """Send until the cache is complete or given up. After a cancellation the next call continues."""
        while not self._over:
            note = rows_note(self._state.run.root)
            if note is None or note["identity"] == self._known:  # the worker may still replace an unfit fetched cache
                await asyncio.sleep(POLL_S)
            else:
                await self._send_with_retries(note["identity"])
                self._over = True

    async def _send_with_retries(self, identity: str) -> None:
        """Send the cache, or log why it is not sent."""
        folder, why = self._state.run.root, ""
        for tries in range(TRIES):
            if tries:
                await asyncio.sleep(RETRY_S)
            try:
                size = sum((folder / name).stat().st_size for name in FILES)
                if why := self._too_large(size):
                    break
                await self._send(identity)
                self._log(f"the tokenised rows are in the store for later attempts: {disk_space.format_bytes(size)}")
                return
            except (ObjectStoreError, OSError) as e:
                why = str(e)
        self._log(f"the tokenised rows stay on this machine, and a later attempt tokenises again: {why}")
        await self._remove(except_folder="")

    def _too_large(self, size: int) -> str:
        """Return why the cache is not sent; empty: the cache is sent. Raises: OSError."""
        if size > self._spec.token_cache_bytes:
            limit = disk_space.format_bytes(self._spec.token_cache_bytes)
            return (
                f"they have {disk_space.format_bytes(size)}, and no more than {limit} are worth their traffic and time"
            )
        url = urlsplit(self._state.env.blobs)
        if url.scheme == "file" and size * SPARE > (free := shutil.disk_usage(unquote(url.path)).free):
            return (
                f"they have {disk_space.format_bytes(size)}, and the store has space"
                f" for {disk_space.format_bytes(free)}"
            )
        return ""

    async def _send(self, identity: str) -> None:
        """Send the pieces that are not sent yet. Raises: ObjectStoreError, OSError."""
        spec, root = self._spec, self._state.run.root
        target = object_keys.token_cache(spec.job, spec.attempt, identity, self._nonce)
        for name, number in [*_piece_sizes(root)][len(self._sent) :]:
            await self._await_checkpoints()
            data = await asyncio.to_thread(_piece, root / name, number)
            path, digest = f"{name}/{number:06d}", hashlib.sha256(data).hexdigest()
            await self._objects.write(f"{target}{object_keys.FILES}{path}", data)
            self._sent.append(ManifestFile(path=path, bytes=len(data), sha256=digest))
        assert spec.data is not None
        manifest = TokenCacheManifest(
            job=spec.job, attempt=spec.attempt, number=spec.number, identity=identity, data_sha256=spec.data.sha256,
            pieces=tuple(self._sent),
        )  # fmt: skip
        if not await self._objects.create(target + object_keys.MANIFEST, manifest.model_dump_json().encode()):
            raise ObjectStoreError(f"{target}{object_keys.MANIFEST} was written by another process")
        await self._remove(except_folder=target)

    async def _await_checkpoints(self) -> None:
        """Wait until no checkpoint is pending; an attempt that must end sends no cache."""
        while True:
            if self._state.ending is None and not self._state.run.waiting():
                return
            await asyncio.sleep(POLL_S)

    async def _remove(self, except_folder: str) -> None:
        """Remove other token caches of this attempt: partial or unusable ones."""
        own = f"{object_keys.checkpoints(self._spec.job)}{self._spec.attempt}/"
        with contextlib.suppress(ObjectStoreError):
            stored = [key for key in await self._objects.keys(own) if object_keys.is_in_token_cache(key)]
            doomed = [key for key in stored if not except_folder or not key.startswith(except_folder)]
            for key in sorted(doomed, key=lambda key: not key.endswith(f"/{object_keys.MANIFEST}")):
                await self._objects.delete(key)


def _piece_sizes(root: Path) -> Iterator[tuple[str, int]]:
    for name in FILES:
        for number in range(-(-(root / name).stat().st_size // PIECE)):
            yield name, number


def _piece(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        file.seek(number * PIECE)
        return file.read(PIECE)
