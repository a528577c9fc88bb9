"""Brings to this machine what the attempt needs: spec, grant, data, code, and the checkpoint to resume from."""

import asyncio
import http.client
import os
import tarfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from cryptography.fernet import Fernet, InvalidToken
from pydantic import ValidationError

from trainer import checkpoint
from trainer.agent.environment import Environment
from trainer.blobs import SMALL_TIMEOUT_S, BadContent, Objects, StoreError
from trainer.checkpoint import Origin
from trainer.checkpoint_plan import Jump
from trainer.contract import keys
from trainer.contract.rendezvous import CONTRACT_VERSION, AttemptSpec, DataFile, Grant, Manifest, Outcome, Sealed

PATIENCE_S = 300.0
"""How long an attempt that has not begun waits for the store: its machine costs money."""

LOOKS = 10
"""At another job's checkpoints, which may go faster than they are fetched."""

T = TypeVar("T")


class Unusable(Exception):
    """The attempt cannot begin."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


async def insist(action: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Repeats `action` while the store is away, with growing pauses. Raises the last StoreError after `patience_s`."""
    deadline, pause = time.monotonic() + patience_s, 0.5
    while True:
        try:
            return await action()
        except StoreError:
            if time.monotonic() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, 15.0)


async def read_spec(objects: Objects, attempt: str) -> AttemptSpec:
    """The attempt's spec. Raises Unusable when it is absent or not for this trainer."""
    data = await insist(lambda: objects.read(keys.spec(attempt)), PATIENCE_S)
    if data is None:
        raise Unusable(Outcome.INFRASTRUCTURE, f"{keys.spec(attempt)} is absent; is GPUBROKER_ATTEMPT right?")
    try:
        spec = AttemptSpec.model_validate_json(data)
    except ValidationError as e:
        first = e.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        raise Unusable(Outcome.USER_ERROR, f"spec.json: {place}: {first['msg']}") from None
    if spec.version > CONTRACT_VERSION:
        raise Unusable(
            Outcome.INFRASTRUCTURE, f"spec.json has version {spec.version}, this trainer knows {CONTRACT_VERSION}"
        )
    if (spec.train is None) == (spec.script is None):
        raise Unusable(Outcome.USER_ERROR, "spec.json: exactly one of train and script must be given")
    return spec


async def read_grant(objects: Objects, env: Environment, url: str | None = None) -> tuple[Grant, Sealed] | None:
    """The grant with what it carries, None when there is none. Raises Unusable when the key does not open it.

    `url`: asked when the store refuses, since the credentials may have ended before a newer grant was read.
    """
    try:
        data = await objects.read(keys.grant(env.attempt))
    except StoreError:
        if not url:
            raise
        data = await asyncio.to_thread(_download, url)
        if data is None:
            raise
    if data is None:
        return None
    if env.key is None:
        raise Unusable(Outcome.INFRASTRUCTURE, "GPUBROKER_ATTEMPT_KEY is not set, and grant.json needs it")
    try:
        grant = Grant.model_validate_json(data)
        return grant, Sealed.model_validate_json(Fernet(env.key).decrypt(grant.sealed))
    except (InvalidToken, ValueError):
        raise Unusable(Outcome.INFRASTRUCTURE, "grant.json does not open with GPUBROKER_ATTEMPT_KEY") from None


def _download(url: str) -> bytes | None:
    """What a signed URL reads; None when that fails, too."""
    try:
        with urllib.request.urlopen(url, timeout=SMALL_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return None


async def fetch(objects: Objects, file: DataFile, path: Path) -> Path:
    """One input object, checked by hash. Raises Unusable(data)."""
    try:
        await insist(lambda: objects.download(file.key, path, size=file.bytes, sha256=file.sha256), PATIENCE_S)
    except BadContent as e:
        raise Unusable(Outcome.DATA, f"data: {e}; submit the job again") from None
    return path


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks the user's code; a member that leaves the folder is refused. Raises Unusable(user_error)."""
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:  # Python 3.11.0-3.11.3, which Debian 12 has
                tar.extractall(folder, members=[_plain(member) for member in tar])
    except (tarfile.TarError, OSError) as e:
        raise Unusable(Outcome.USER_ERROR, f"script.code: {e}; give a plain .tar of files and folders") from None


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Files, folders and links that stay below the folder, as `tarfile.data_filter` has it. Raises TarError."""
    name = Path(member.name)
    inside = not name.is_absolute() and ".." not in name.parts
    if member.issym() or member.islnk():
        start = name.parent if member.issym() else Path()
        target = os.path.normpath(start / member.linkname)
        inside = inside and not os.path.isabs(target) and not target.startswith("..")
    elif not (member.isreg() or member.isdir()):
        inside = False
    if not inside:
        raise tarfile.TarError(f"{member.name!r} is no file or folder within the archive")
    member.mode = 0o755 if member.isdir() else (member.mode & 0o755) | 0o600
    return member


async def restore(
    objects: Objects,
    spec: AttemptSpec,
    origin: Origin,
    folder: Path,
    tell: Callable[[str], None],
    jumps: tuple[Jump, ...] = (),
) -> tuple[str, Manifest] | None:
    """The newest checkpoint that verifies: this attempt's own (the agent may have been restarted), then the spec's,
    then what another job that it starts from has by now.

    `jumps`: the way past bad steps, on which it must lie.
    """

    async def action() -> tuple[str, Manifest] | None:
        candidates, tried = [*await checkpoint.own(objects, origin), *spec.resume_from], set[str]()
        found: tuple[str, Manifest] | None = None
        for _ in range(LOOKS):
            found = await checkpoint.restore(objects, candidates, folder, kind=origin.kind, tell=tell, jumps=jumps)
            tried.update(candidates)
            candidates = [] if found else [key for key in await _elsewhere(objects, spec) if key not in tried]
            if not candidates:
                break
        return found

    return await insist(action, PATIENCE_S)


async def _elsewhere(objects: Objects, spec: AttemptSpec) -> list[str]:
    """What the jobs have committed that the spec names checkpoints of, but for its own, the furthest step first. One
    that still runs removes what was named as it goes on."""
    jobs = {key.split("/")[1] for key in spec.resume_from} - {spec.job}
    found = [key for job in sorted(jobs) for key in keys.manifests(await objects.keys(keys.checkpoints(job)))]
    return sorted(found, key=keys.step_of, reverse=True)
