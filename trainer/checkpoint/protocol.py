"""Checkpoint protocol of the blob store, the same for `train` and `script` jobs.

Commit: every file first, then `manifest.json` with sizes and sha256, put only if absent. Without a manifest there is no
checkpoint. Restore: the newest candidate whose every byte verifies. Prune: delete the manifest first. The newest
`keep`, the milestones and the checkpoints for a rollback stay, so the last good one is never deleted. A folder's name
contains a nonce, so that no later save uses an uncommitted folder again.
"""

import asyncio
import hashlib
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

from pydantic import ValidationError

from trainer.contract import checkpoint_format, object_keys
from trainer.contract.base import Document
from trainer.contract.checkpoint_format import BadFormat, RowSkip
from trainer.contract.documents import CONTRACT_VERSION, Manifest, ManifestFile
from trainer.contract.guard import GuardConfig, rollback_manifests
from trainer.contract.save_interval import milestones
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import SnapshotPart
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError

T = TypeVar("T")
PARALLEL = 4
POLL_S = 0.5
"""Seconds between checks for another machine's part."""
PART = "part-"
"""Prefix of the file in which another machine describes its part."""


class Offered(Document):
    """Files that a machine has uploaded for the first machine to commit."""

    files: tuple[ManifestFile, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Job, attempt and kind that checkpoints belong to."""

    job: str
    attempt: str
    kind: Literal["train", "script"]

    @property
    def folder(self) -> str:
        """Folder of this attempt's checkpoints, with the closing slash."""
        return f"{object_keys.checkpoints(self.job)}{self.attempt}/"


async def commit(
    objects: Objects,
    origin: Origin,
    folder: Path,
    *,
    step: int,
    complete: bool,
    taken_s: float,
    sent: Callable[[int], None] = lambda count: None,
) -> tuple[str, Manifest]:
    """Upload every file of `folder` and commit them; return the manifest's key and the manifest.

    `taken_s`: seconds that the snapshot took. `sent`: called during uploads with the bytes since the previous call.

    Raises: ObjectStoreError, BadContent; uploaded files then stay uncommitted and are never used.
    """
    began = time.monotonic() - taken_s
    target = object_keys.checkpoint(origin.job, origin.attempt, step, secrets.token_hex(4), complete=complete)
    files = await _send(objects, target, folder, sent)
    return await _seal(objects, origin, target, files, step=step, complete=complete, began=began)


async def offer(
    objects: Objects,
    origin: Origin,
    folder: Path,
    *,
    step: int,
    complete: bool,
    part: SnapshotPart,
    sent: Callable[[int], None] = lambda count: None,
) -> int:
    """Upload another machine's part of a checkpoint for the first machine to commit; return its bytes.

    Raises: ObjectStoreError.
    """
    target = object_keys.checkpoint(origin.job, origin.attempt, step, part.nonce, complete=complete)
    offered = Offered(files=tuple(await _send(objects, target, folder, sent)))
    await objects.write(f"{target}{PART}{part.node}.json", offered.model_dump_json().encode())
    return sum(f.bytes for f in offered.files)


async def commit_parts(
    objects: Objects,
    origin: Origin,
    folder: Path,
    *,
    step: int,
    complete: bool,
    taken_s: float,
    part: SnapshotPart,
    should_give_up: Callable[[], bool],
    sent: Callable[[int], None] = lambda count: None,
) -> tuple[str, Manifest] | None:
    """Upload the first machine's part, wait for the other parts and commit them all.

    Return None if `should_give_up` returns True while a part is missing, e.g. because its machine has ended.

    Raises: ObjectStoreError, also if an offered file is missing; BadContent if a part's description cannot be read,
    or if this checkpoint has a different manifest already.
    """
    began = time.monotonic() - taken_s
    target = object_keys.checkpoint(origin.job, origin.attempt, step, part.nonce, complete=complete)
    files = await _send(objects, target, folder, sent)
    for node in range(1, part.nodes):
        key = f"{target}{PART}{node}.json"
        while (data := await objects.read(key)) is None:
            if should_give_up():
                return None
            await asyncio.sleep(POLL_S)
        try:
            files += Offered.model_validate_json(data).files
        except ValidationError:
            raise BadContent(f"{key} cannot be read") from None
    stored = set(await objects.keys(target))
    if absent := [f.path for f in files if target + object_keys.FILES + f.path not in stored]:
        raise ObjectStoreError(f"{target}{absent[0]} was offered and is absent")
    return await _seal(objects, origin, target, files, step=step, complete=complete, began=began)


async def _send(objects: Objects, target: str, folder: Path, sent: Callable[[int], None]) -> list[ManifestFile]:
    """Upload every file of the folder."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    gate, below = asyncio.Semaphore(PARALLEL), target + object_keys.FILES

    async def send(path: Path) -> ManifestFile:
        name = path.relative_to(folder).as_posix()
        async with gate:
            sha256 = await asyncio.to_thread(sha256_of, path)
            await objects.upload(below + name, path, sent)
        return ManifestFile(path=name, bytes=path.stat().st_size, sha256=sha256)

    return await side_by_side([send(p) for p in paths])


async def side_by_side(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run calls concurrently; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _seal(
    objects: Objects,
    origin: Origin,
    target: str,
    files: Sequence[ManifestFile],
    *,
    step: int,
    complete: bool,
    began: float,
) -> tuple[str, Manifest]:
    """Write the manifest that commits a checkpoint. `began`: monotonic seconds at which its work began.

    Raises: ObjectStoreError; BadContent if the checkpoint has another manifest.
    """
    manifest = Manifest(
        job=origin.job,
        attempt=origin.attempt,
        step=step,
        kind=origin.kind,
        files=tuple(files),
        complete=complete,
        save_s=round(time.monotonic() - began, 3),
    )
    key = target + object_keys.MANIFEST
    if await objects.create(key, manifest.model_dump_json().encode()):
        return key, manifest
    # An earlier try may have written the manifest although its reply was lost. Only `save_s` then differs.
    stored = await read_manifest(objects, key)
    if stored.model_copy(update={"save_s": manifest.save_s}) != manifest:
        raise BadContent(f"{key} was written by another process")
    return key, stored


async def own_manifests(objects: Objects, origin: Origin) -> list[str]:
    """Return the keys of the manifests that this attempt committed, newest first.

    Of two manifests of the same step, the one with results comes first.

    Raises: ObjectStoreError.
    """
    return [*object_keys.manifests(reversed(await objects.keys(origin.folder)))]


async def read_manifest(objects: Objects, key: str) -> Manifest:
    """Return a checkpoint's manifest. Raises: BadContent if it is absent or cannot be read; ObjectStoreError."""
    data = await objects.read(key)
    if data is None:
        raise BadContent("its manifest is absent")
    try:
        return Manifest.model_validate_json(data)
    except ValidationError:
        raise BadContent("its manifest cannot be read") from None


async def verified(objects: Objects, key: str) -> bool:
    """Return True if the store has every file of the results, with the size in their manifest.

    The content is not read back, because a listing costs no traffic; a restore checks the hashes.

    Raises: ObjectStoreError.
    """
    try:
        manifest = await read_manifest(objects, key)
    except BadContent:
        return False
    folder = object_keys.files_prefix(key)
    sizes = await objects.sizes(folder)
    return manifest.complete and all(sizes.get(folder + file.path) == file.bytes for file in manifest.files)


async def remove_after(objects: Objects, origin: Origin, step: int) -> None:
    """Delete this attempt's checkpoints after `step`, because a rollback abandoned them. Raises: ObjectStoreError."""
    for key in await own_manifests(objects, origin):
        if object_keys.step_of(key) > step:
            await objects.delete(key)


async def restore(
    objects: Objects,
    candidates: Sequence[str],
    folder: Path,
    *,
    kind: str,
    log: Callable[[str], None],
    jumps: tuple[RowSkip, ...] = (),
) -> tuple[str, Manifest] | None:
    """Fill `folder` with the first candidate that verifies, or return None.

    `log` receives why a candidate was passed over. `jumps`: a candidate must have applied these row skips.

    Raises: ObjectStoreError.
    """
    if jumps:
        candidates = [key for key in candidates if object_keys.step_of(key) <= jumps[-1].step]
    for key in candidates:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            manifest = await _fetch(objects, key, folder, kind)
            if jumps and not checkpoint_format.has_due_row_skips(folder, jumps):
                raise BadContent("it comes from before the training went back")
        except BadContent as e:
            log(f"checkpoint {key} cannot be used: {e}; falling back to the one before it")
            continue
        return key, manifest
    shutil.rmtree(folder, ignore_errors=True)
    return None


async def _fetch(objects: Objects, key: str, folder: Path, kind: str) -> Manifest:
    manifest = await read_manifest(objects, key)
    if manifest.version > CONTRACT_VERSION:
        raise BadContent(f"its version is {manifest.version}, this trainer reads {CONTRACT_VERSION}; take a newer one")
    if manifest.kind != kind:
        raise BadContent(f"it is a {manifest.kind} checkpoint, and this is a {kind} job")
    source = object_keys.files_prefix(key)
    gate = asyncio.Semaphore(PARALLEL)

    async def get(file: ManifestFile) -> None:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise BadContent(f"it names the path {file.path!r}, which leaves the folder")
        async with gate:
            await objects.download(source + file.path, folder / path, size=file.bytes, sha256=file.sha256)

    await side_by_side([get(f) for f in manifest.files])
    if kind == "train":
        try:
            await asyncio.to_thread(checkpoint_format.verify, folder)
        except BadFormat as e:
            raise BadContent(str(e)) from None
    return manifest


async def prune(
    objects: Objects, origin: Origin, config: CheckpointConfig, guard: GuardConfig | None, *, earlier: bool = False
) -> None:
    """Delete checkpoints of this attempt that no rule retains, uncommitted ones too.

    The newest `keep`, the job's milestones and the checkpoints for a rollback stay. `guard`: None for a script.
    `earlier`: True prunes checkpoints of earlier attempts too; otherwise the broker prunes those.

    Raises: ObjectStoreError; the next call deletes the rest.
    """
    listed = await objects.keys(object_keys.checkpoints(origin.job))
    own_keys = [k for k in listed if (earlier or k.startswith(origin.folder)) and not object_keys.is_in_token_cache(k)]
    manifests = [*object_keys.manifests(own_keys)]
    newest = manifests[-config.keep :]
    retained = {*newest, *milestones(listed, config.keep_every)}
    if newest:
        retained |= rollback_manifests(manifests, min(map(object_keys.step_of, newest)), guard)
    folders = {k.removesuffix(object_keys.MANIFEST) for k in retained}
    for key in manifests:
        if key not in retained:
            await objects.delete(key)
    last = _up_to_step(max(newest, default=""))
    for key in own_keys:
        parent = "/".join(key.split("/")[:4]) + "/"
        if parent not in folders and _up_to_step(parent) <= last and key not in manifests:
            await objects.delete(key)


def _up_to_step(key: str) -> str:
    """Return a checkpoint's key up to its step, without the nonce; such keys sort by attempt, then by step.

    An uncommitted folder up to the newest commit can be deleted, because its upload is no longer in progress.
    """
    *above, name = key.split("/")[:4]
    return "/".join((*above, name.partition("-")[0]))


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
