"""The checkpoint protocol of the blob store, the same for `train` and `script` jobs.

Commit: every file first, then `manifest.json` with sizes and sha256, put only if absent: without one there is no
checkpoint. Restore: the newest candidate whose every byte verifies. Prune: the manifest goes first, the newest
`keep` stay, so the last good one is never the one deleted, the milestones, and what the guard may go back to. A
folder's nonce keeps it from being used twice.
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

from trainer.contract import checkpoint_format as checkpoint_plan
from trainer.contract import object_keys as keys
from trainer.contract.base import Document
from trainer.contract.checkpoint_format import BadFormat, RowSkip
from trainer.contract.documents import CONTRACT_VERSION, Manifest, ManifestFile
from trainer.contract.guard import GuardConfig, rollback_manifests
from trainer.contract.milestones import milestones
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import SnapshotPart
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError

T = TypeVar("T")
PARALLEL = 4
LOOK_S = 0.5
PART = "part-"
"""Begins the name of what another machine says of its part."""


class Offered(Document):
    """What a machine has uploaded."""

    files: tuple[ManifestFile, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Whose checkpoints these are."""

    job: str
    attempt: str
    kind: Literal["train", "script"]

    @property
    def folder(self) -> str:
        """Where this attempt's checkpoints lie, with the closing slash."""
        return f"{keys.checkpoints(self.job)}{self.attempt}/"


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
    """Uploads every file of `folder` and commits it; returns the manifest's key and the manifest.

    `taken_s`: seconds that its snapshot took. `sent`: is told of more bytes. Raises StoreError; what was uploaded by
    then stays uncommitted and is never used.
    """
    began = time.monotonic() - taken_s
    target = keys.checkpoint(origin.job, origin.attempt, step, secrets.token_hex(4), complete=complete)
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
    """Uploads another machine's part of a checkpoint, for the first machine to commit; the bytes of it.

    Raises StoreError.
    """
    target = keys.checkpoint(origin.job, origin.attempt, step, part.nonce, complete=complete)
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
    hopeless: Callable[[], bool],
    sent: Callable[[int], None] = lambda count: None,
) -> tuple[str, Manifest] | None:
    """Uploads the first machine's part, waits for the others' and commits the whole.

    None when that is `hopeless` meanwhile: another machine may have gone on to a later one. Raises StoreError, also
    when what was offered is not there.
    """
    began = time.monotonic() - taken_s
    target = keys.checkpoint(origin.job, origin.attempt, step, part.nonce, complete=complete)
    files = await _send(objects, target, folder, sent)
    for node in range(1, part.nodes):
        while (data := await objects.read(f"{target}{PART}{node}.json")) is None:
            if hopeless():
                return None
            await asyncio.sleep(LOOK_S)
        files += Offered.model_validate_json(data).files
    there = set(await objects.keys(target))
    if gone := [f.path for f in files if target + keys.FILES + f.path not in there]:
        raise ObjectStoreError(f"{target}{gone[0]} was offered and is absent")
    return await _seal(objects, origin, target, files, step=step, complete=complete, began=began)


async def _send(objects: Objects, target: str, folder: Path, sent: Callable[[int], None]) -> list[ManifestFile]:
    """Uploads every file of the folder."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    gate, below = asyncio.Semaphore(PARALLEL), target + keys.FILES

    async def send(path: Path) -> ManifestFile:
        name = path.relative_to(folder).as_posix()
        async with gate:
            sha256 = await asyncio.to_thread(sha256_of, path)
            await objects.upload(below + name, path, sent)
        return ManifestFile(path=name, bytes=path.stat().st_size, sha256=sha256)

    return await side_by_side([send(p) for p in paths])


async def side_by_side(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Side by side; where one fails the others end as well."""
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
    """The manifest, by which the checkpoint comes to be. `began`: monotonic seconds at which its work did."""
    manifest = Manifest(
        job=origin.job,
        attempt=origin.attempt,
        step=step,
        kind=origin.kind,
        files=tuple(files),
        complete=complete,
        save_s=round(time.monotonic() - began, 3),
    )
    key = target + keys.MANIFEST
    if await objects.create(key, manifest.model_dump_json().encode()):
        return key, manifest
    # The reply to an earlier try may have been lost, and that one took another time.
    there = Manifest.model_validate_json(await objects.read(key) or b"{}")
    if there.model_copy(update={"save_s": manifest.save_s}) != manifest:
        raise BadContent(f"{key} was written by somebody else")
    return key, there


async def own(objects: Objects, origin: Origin) -> list[str]:
    """Manifests that this attempt committed, newest first; of one step the results first. Raises StoreError."""
    found = await objects.keys(origin.folder)
    return [*keys.manifests(reversed(found))]


async def verified(objects: Objects, key: str) -> bool:
    """Whether the results lie in the store as their manifest says. Raises StoreError."""
    data = await objects.read(key)
    manifest = Manifest.model_validate_json(data) if data is not None else None
    if manifest is None or not manifest.complete:
        return False
    folder = keys.files_prefix(key)
    there = set(await objects.keys(folder))
    return all(folder + file.path in there for file in manifest.files)


async def remove_after(objects: Objects, origin: Origin, step: int) -> None:
    """Own checkpoints of later steps: those of a way that is not gone on. Raises StoreError."""
    for key in await own(objects, origin):
        if keys.step_of(key) > step:
            await objects.delete(key)


async def restore(
    objects: Objects,
    candidates: Sequence[str],
    folder: Path,
    *,
    kind: str,
    tell: Callable[[str], None],
    jumps: tuple[RowSkip, ...] = (),
) -> tuple[str, Manifest] | None:
    """Fills `folder` with the first candidate that verifies, None when none does. Raises StoreError.

    `tell` hears why a candidate was passed over. `jumps`: only what lies on the way that they lead is used.
    """
    if jumps:
        candidates = [key for key in candidates if keys.step_of(key) <= jumps[-1].step]
    for key in candidates:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            manifest = await _fetch(objects, key, folder, kind)
            if jumps and not checkpoint_plan.has_due_row_skips(folder, jumps):
                raise BadContent("it comes from before the training went back")
        except BadContent as e:
            tell(f"checkpoint {key} cannot be used: {e}; falling back to the one before it")
            continue
        return key, manifest
    shutil.rmtree(folder, ignore_errors=True)
    return None


async def _fetch(objects: Objects, key: str, folder: Path, kind: str) -> Manifest:
    data = await objects.read(key)
    if data is None:
        raise BadContent("its manifest is absent")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        raise BadContent("its manifest cannot be read") from None
    if manifest.version > CONTRACT_VERSION:
        raise BadContent(f"its version is {manifest.version}, this trainer knows {CONTRACT_VERSION}; take a newer one")
    if manifest.kind != kind:
        raise BadContent(f"it is a {manifest.kind} checkpoint, and this is a {kind} job")
    source = keys.files_prefix(key)
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
            await asyncio.to_thread(checkpoint_plan.verify, folder)
        except BadFormat as e:
            raise BadContent(str(e)) from None
    return manifest


async def prune(
    objects: Objects, origin: Origin, config: CheckpointConfig, guard: GuardConfig | None, *, earlier: bool = False
) -> None:
    """Keeps the newest `keep` committed checkpoints of this attempt, the job's milestones and what the guard may go
    back to, and removes its older ones, torn ones too. `guard`: None for a script. `earlier`: those of the attempts
    before count as this one's; else they are the broker's.

    Raises StoreError; whatever is left then goes next time.
    """
    every = await objects.keys(keys.checkpoints(origin.job))
    mine = [k for k in every if (earlier or k.startswith(origin.folder)) and not keys.is_in_token_cache(k)]
    manifests = [*keys.manifests(mine)]
    newest = manifests[-config.keep :]
    kept = {*newest, *milestones(every, config.keep_every)}
    if newest:
        kept |= rollback_manifests(manifests, min(map(keys.step_of, newest)), guard)
    folders = {k.removesuffix(keys.MANIFEST) for k in kept}
    for key in manifests:
        if key not in kept:
            await objects.delete(key)
    last = _up_to_step(max(newest, default=""))
    for key in mine:
        parent = "/".join(key.split("/")[:4]) + "/"
        if parent not in folders and _up_to_step(parent) <= last and key not in manifests:
            await objects.delete(key)


def _up_to_step(key: str) -> str:
    """Of a checkpoint's key, without the nonce: of one step nothing is still to come once a later try is committed."""
    *above, name = key.split("/")[:4]
    return "/".join((*above, name.partition("-")[0]))


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
