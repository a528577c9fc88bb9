"""Fetches the inputs of an attempt: spec, grant, data, code, and the checkpoint to resume from."""

import asyncio
import http.client
import os
import tarfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cryptography.fernet import Fernet, InvalidToken
from pydantic import ValidationError

from trainer.agent.base.environment import Environment
from trainer.checkpoint import protocol
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys
from trainer.contract.checkpoint_format import RowSkip
from trainer.contract.documents import CONTRACT_VERSION, AttemptSpec, DataFile, Grant, Manifest, Outcome, Sealed
from trainer.objectstore.objects import SMALL_TIMEOUT_S, BadContent, Objects, ObjectStoreError

RETRY_FOR_S = 300.0
"""Seconds that an attempt waits for the store before it begins; its machine costs money meanwhile."""

FETCH_TRIES = 10
"""Attempts to fetch a checkpoint of another job, which may delete it during the fetch."""

T = TypeVar("T")
Load = Callable[[Sequence[str]], Awaitable[tuple[str, Manifest] | None]]
"""Function that loads the first candidate that verifies."""


class UnusableInput(Exception):
    """An input prevents the attempt from starting."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


async def retry_while_unreachable(action: Callable[[], Awaitable[T]], retry_for_s: float) -> T:
    """Repeat `action` with growing pauses while the store is unreachable.

    Raises: ObjectStoreError, the last one, after `retry_for_s` seconds.
    """
    deadline, pause = time.monotonic() + retry_for_s, 0.5
    while True:
        try:
            return await action()
        except ObjectStoreError:
            if time.monotonic() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, 15.0)


async def read_spec(objects: Objects, attempt: str) -> AttemptSpec:
    """Return the attempt's spec. Raises: UnusableInput if it is absent or not for this trainer."""
    data = await retry_while_unreachable(lambda: objects.read(object_keys.spec(attempt)), RETRY_FOR_S)
    if data is None:
        raise UnusableInput(
            Outcome.INFRASTRUCTURE, f"{object_keys.spec(attempt)} is absent; is GPUBROKER_ATTEMPT right?"
        )
    try:
        spec = AttemptSpec.model_validate_json(data)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        raise UnusableInput(Outcome.USER_ERROR, f"spec.json: {place}: {first['msg']}") from None
    if spec.version > CONTRACT_VERSION:
        raise UnusableInput(
            Outcome.INFRASTRUCTURE, f"spec.json has version {spec.version}, this trainer reads {CONTRACT_VERSION}"
        )
    if (spec.train is None) == (spec.script is None):
        raise UnusableInput(Outcome.USER_ERROR, "spec.json: exactly one of train and script must be given")
    return spec


async def read_grant(objects: Objects, env: Environment, url: str | None = None) -> tuple[Grant, Sealed] | None:
    """Return the grant and its content, or None if there is no grant.

    `url` is read if the store refuses, because credentials may expire before a newer grant is read.

    Raises: UnusableInput if the key does not open the grant.
    """
    try:
        data = await objects.read(object_keys.grant(env.attempt))
    except ObjectStoreError:
        if not url:
            raise
        data = await asyncio.to_thread(_download, url)
        if data is None:
            raise
    if data is None:
        return None
    if env.key is None:
        raise UnusableInput(Outcome.INFRASTRUCTURE, "GPUBROKER_ATTEMPT_KEY is not set, and grant.json needs it")
    try:
        grant = Grant.model_validate_json(data)
        return grant, Sealed.model_validate_json(Fernet(env.key).decrypt(grant.sealed))
    except (InvalidToken, ValueError):
        raise UnusableInput(Outcome.INFRASTRUCTURE, "grant.json does not open with GPUBROKER_ATTEMPT_KEY") from None


def _download(url: str) -> bytes | None:
    """Return the content of a signed URL, or None if the download fails."""
    try:
        with urllib.request.urlopen(url, timeout=SMALL_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return None


async def fetch(objects: Objects, file: DataFile, path: Path) -> Path:
    """Fetch one input object and check its hash. Raises: UnusableInput (data)."""
    try:
        await retry_while_unreachable(
            lambda: objects.download(file.key, path, size=file.bytes, sha256=file.sha256), RETRY_FOR_S
        )
    except BadContent as e:
        raise UnusableInput(Outcome.DATA, f"data: {e}; submit the job again") from None
    return path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the user's code; refuse a member that leaves the folder. Raises: UnusableInput (user error)."""
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:  # Python 3.11.0-3.11.3, as in Debian 12
                tar.extractall(folder, members=[_plain(member) for member in tar])
    except (tarfile.TarError, OSError) as e:
        raise UnusableInput(Outcome.USER_ERROR, f"script.code: {e}; give a plain .tar of files and folders") from None


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a file, folder or link that stays below the folder, sanitised as by `tarfile.data_filter`.

    Raises: TarError.
    """
    name = Path(member.name)
    inside = not name.is_absolute() and ".." not in name.parts
    if member.issym() or member.islnk():
        start = name.parent if member.issym() else Path()
        target = os.path.normpath(start / member.linkname)
        inside = inside and not os.path.isabs(target) and not target.startswith("..")
    elif not (member.isreg() or member.isdir()):
        inside = False
    if not inside:
        raise tarfile.TarError(f"{member.name!r} is not a file or folder within the archive")
    member.mode = 0o755 if member.isdir() else (member.mode & 0o755) | 0o600
    return member


async def restore(
    objects: Objects,
    spec: AttemptSpec,
    origin: Origin,
    folder: Path,
    log: Callable[[str], None],
    jumps: tuple[RowSkip, ...] = (),
) -> tuple[str, Manifest] | None:
    """Restore the newest checkpoint that verifies into `folder`; `furthest` defines the order.

    A checkpoint verifies only if it has applied the row skips in `jumps` that were due.

    Raises: ObjectStoreError.
    """
    load = partial(protocol.restore, objects, folder=folder, kind=origin.kind, log=log, jumps=jumps)
    return await retry_while_unreachable(lambda: furthest(objects, spec, origin, load), RETRY_FOR_S)


async def furthest(objects: Objects, spec: AttemptSpec, origin: Origin, load: Load) -> tuple[str, Manifest] | None:
    """Return the result of `load` for the first usable candidates, or None if none is usable.

    The order is: checkpoints of this attempt (after a restart of the agent), then the checkpoints of its job that the
    spec names. For a start from another job: the first of the spec, all that the other job stores now (newest first),
    the rest of the spec. The rest matters because a running job deletes recent checkpoints but keeps some far older
    ones. Each machine searches on its own.
    """
    others = [n for n, key in enumerate(spec.resume_from, 1) if key.split("/")[1] != spec.job]
    candidates = [*await protocol.own_manifests(objects, origin), *spec.resume_from[: min(others, default=None)]]
    tried = set[str]()
    for looks_left in reversed(range(FETCH_TRIES)):
        loaded = await load(candidates)
        tried.update(candidates)
        if loaded is not None:
            return loaded
        named = (*await _elsewhere(objects, spec), *spec.resume_from)
        left = [key for key in dict.fromkeys(named) if key not in tried]
        candidates = left[:1] if looks_left > 1 else left  # list again before each one, because it may be deleted
        if not candidates:
            break
    return None


async def _elsewhere(objects: Objects, spec: AttemptSpec) -> list[str]:
    """Return checkpoints of the other jobs named in the spec, highest step first.

    A running job deletes the named checkpoints as it proceeds.
    """
    jobs = {key.split("/")[1] for key in spec.resume_from} - {spec.job}
    stored = [
        key for job in sorted(jobs) for key in object_keys.manifests(await objects.keys(object_keys.checkpoints(job)))
    ]
    return sorted(stored, key=object_keys.step_of, reverse=True)
