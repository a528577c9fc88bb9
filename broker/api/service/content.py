"""Use cases that move bytes: uploads, logs and artifacts. All bytes are in the blob store."""

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.api.core.auth import Caller
from broker.api.core.log_position import Chunk, LogPiece, Position, chunks_of
from broker.api.core.problems import Corrupt, NotFound, TooMany
from broker.api.core.transfer_memory import HeldMemory, TransferMemory
from broker.api.core.upload_spool import check_disk_space, spooled
from broker.api.schemas.queries import UploadFormat
from broker.api.service.job_data import check_kept
from broker.api.service.jobs import Service
from broker.billing.invoice_formats import Format
from broker.billing.reconcile import Invoice
from broker.domain.errors import BlobTooLarge, InvalidInput, Problem
from broker.domain.ids import AttemptId, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt, Job
from broker.lifecycle.retention import last_checkpoint
from broker.ports import Upload
from broker.ports.blobs import MAX_LISTED
from broker.reporting.log_lines import WHOLE_LOG, LogPart
from trainer.contract import object_keys
from trainer.contract.documents import Manifest, ManifestFile
from trainer.dataset.prompts import DataError
from trainer.dataset.readers import format_of

log = logging.getLogger(__name__)

UPLOADS_AT_ONCE, UPLOADS_OF_TEAM = 4, 3
"""Maximum concurrent uploads, in all and per team. Further uploads wait. Each takes up to `Settings.upload_bytes` of
disk. The limit per team keeps one team from blocking the others.
"""
WAITING_OF_TEAM = 32
"""Maximum uploads of a team that run or wait; further uploads are refused."""
PARSED_AT_ONCE = 2
"""Maximum uploaded files that are parsed at once, at most one of each team."""
RANGE_BYTES = 4 << 20
"""Bytes of a file that are read into memory at once while it is sent."""
STALLED_S = 30.0
"""Seconds without data after which an upload is aborted."""
MANIFEST_BYTES, MANIFEST_COMMAS = 4 << 20, 80_000
"""Maximum size of a checkpoint's manifest: about 20,000 files. The event loop parses it within 0.1 s."""
MANIFESTS_OF_ATTEMPT = 5
"""Newest manifests of an attempt that are read. A host can write any number of invalid ones."""
CHUNK_BYTES = 1 << 20
"""Maximum bytes of a chunk of a log. The agent writes chunks of up to 256 KiB."""
LOG_BYTES = 64 << 20
"""Bytes of a log's end that are returned at once; `follow` returns the whole log."""
COPIES = 2
"""Copies of a log in memory: its chunks, and the text that is made of them."""


class Content:
    """Use cases that move bytes. `Service.job` checks the caller's access."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._blobs = service.blobs
        self._uploading = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._of_team: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, UPLOADS_OF_TEAM))
        self._parsing = asyncio.Semaphore(PARSED_AT_ONCE)
        self._parsing_of_team: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, 1))
        self._waiting: defaultdict[str, int] = defaultdict(int)
        self._memory = TransferMemory()

    # --------------------------------------------------------------------------------------------------------- uploads

    async def upload(
        self,
        caller: Caller,
        name: str,
        declared: UploadFormat | None,
        body: AsyncIterable[bytes],
        *,
        sha256: str | None,
    ) -> Upload:
        """Read, check and store a data set or a .tar of code. `sha256`: its expected hash, or None.

        Raises TooLarge, StorageFull, TooMany, InvalidInput; then nothing is stored.
        """
        _format(name, declared)  # an unknown ending is refused without a turn
        async with self.upload_turn(caller.team):
            return await self.upload_in_turn(caller, name, declared, body, sha256=sha256)

    @contextlib.asynccontextmanager
    async def upload_turn(self, team: str) -> AsyncGenerator[None]:
        """Hold one of the concurrent uploads of the team and of the daemon within the block. Raises TooMany."""
        async with self._upload_slot(team), self._of_team[team], self._uploading:
            yield

    async def upload_in_turn(
        self,
        caller: Caller,
        name: str,
        declared: UploadFormat | None,
        body: AsyncIterable[bytes],
        *,
        sha256: str | None,
    ) -> Upload:
        """Read, check and store as `upload`, within a block of `upload_turn`."""
        fmt, settings = _format(name, declared), self._service.settings
        async with spooled(settings.spool, _in_time(body), max_bytes=settings.upload_bytes) as file:
            if sha256 not in (None, file.sha256):
                message = f"these {file.bytes} bytes have {file.sha256}; they were changed in transit; send them again"
                raise InvalidInput(Problem(field="sha256", message=message))
            summary = await self._examine(caller.team, file.path, fmt)
            if settings.blobs is not None:
                check_disk_space(settings.blobs, file.bytes)
            await self._blobs.put_file(object_keys.upload(file.sha256), file.path)
        upload = Upload(sha256=file.sha256, bytes=file.bytes, name=name, summary=summary)
        await self._service.rows(caller).put_upload(caller.owner, upload)
        return upload

    async def read_invoice(self, caller: Caller, fmt: Format, body: AsyncIterable[bytes]) -> Invoice:
        """Read a cloud's invoice within the limits of uploads; nothing is stored.

        Raises TooLarge, StorageFull, TooMany, InvalidInput.
        """
        settings, team = self._service.settings, caller.team
        async with (
            self.upload_turn(team),
            spooled(settings.spool, _in_time(body), max_bytes=settings.upload_bytes) as file,
            self._parsing_of_team[team],
            self._parsing,
        ):
            return await self._service.quotes.preflight.read_invoice(file.path, fmt)

    @contextlib.asynccontextmanager
    async def _upload_slot(self, team: str) -> AsyncGenerator[None]:
        """Count an upload of the team within the block. Raises TooMany."""
        if self._waiting[team] >= WAITING_OF_TEAM:
            raise TooMany(f"team {team!r} has {WAITING_OF_TEAM} uploads already; wait until one of them is done")
        self._waiting[team] += 1
        try:
            yield
        finally:
            self._waiting[team] -= 1

    async def _examine(self, team: str, data: Path, fmt: UploadFormat) -> Mapping[str, Any] | None:
        """Return the data check's summary, or None for a .tar of code. One file of a team is parsed at a time."""
        async with self._parsing_of_team[team], self._parsing:
            return await self._service.quotes.preflight.summarise(data, fmt)

    # ------------------------------------------------------------------------------------------------------- artifacts

    async def manifest(self, caller: Caller, job_id: JobId) -> tuple[str, Manifest] | None:
        """Return (key prefix of its files, manifest) of the job's last committed checkpoint, or None."""
        job = await self._service.job(caller, job_id)
        check_kept(job, last_checkpoint(job))
        for key in await self._manifests(caller, job):
            manifest = await self._readable(key)
            if manifest is not None and manifest.job == job.id:
                return object_keys.files_prefix(key), manifest
        return None

    async def _readable(self, key: str) -> Manifest | None:
        """Return a manifest, or None if it is absent, invalid or too large. A rented machine wrote it."""
        try:
            raw = await self._blobs.get(key, max_bytes=MANIFEST_BYTES)
        except BlobTooLarge as e:
            log.warning("%s; it is not a manifest of the trainer and is ignored", e)
            return None
        return None if raw is None else _parse(raw)

    async def _manifests(self, caller: Caller, job: Job) -> list[str]:
        """Return the keys of the newest manifests of each attempt, newest first: by attempt number, then by step.

        For equal steps, the attempt's final checkpoint comes first. Folders of unknown attempts are ignored.
        """
        attempts = await self._service.attempts(caller, job)
        numbers = {a.id: a.number for a in attempts}
        ends = {a.final.checkpoint.manifest for a in attempts if a.final and a.final.checkpoint}
        prefix = object_keys.checkpoints(job.id)
        manifests: list[tuple[int, int, bool, str]] = []
        for info in await self._blobs.list(prefix, max_objects=MAX_LISTED):
            attempt = info.key.removeprefix(prefix).partition("/")[0]
            if object_keys.is_manifest(info.key) and AttemptId(attempt) in numbers:
                manifests.append(
                    (numbers[AttemptId(attempt)], object_keys.step_of(info.key), info.key in ends, info.key)
                )
        read: Counter[int] = Counter()
        newest: list[str] = []
        for number, *_, key in sorted(manifests, reverse=True):
            read[number] += 1
            if read[number] <= MANIFESTS_OF_ATTEMPT:
                newest.append(key)
        return newest

    async def artifact(self, caller: Caller, job_id: JobId, path: str) -> tuple[ManifestFile, AsyncGenerator[bytes]]:
        """Return one file and its chunks. Raises NotFound; the chunks raise Corrupt.

        The last chunk is returned only after the whole file matched its hash in the manifest.
        """
        prefix, file = await self._located(caller, job_id, path)
        return file, self._held(caller, file, self._checked(prefix + path, file, f"{path} of job {job_id}"))

    async def artifact_end(self, caller: Caller, job_id: JobId, path: str, max_bytes: int) -> tuple[bytes, int]:
        """Return the last `max_bytes` bytes of a file and the number of bytes before them. Raises NotFound, Corrupt.

        Only a file that is read as a whole is checked against its hash.
        """
        prefix, file = await self._located(caller, job_id, path)
        name, start = f"{path} of job {job_id}", file.bytes - max_bytes
        if start <= 0:
            return b"".join([piece async for piece in self._checked(prefix + path, file, name)]), 0
        end = await self._blobs.get_range(prefix + path, start, max_bytes + 1)
        if end is None or len(end) != max_bytes:
            raise _corrupt(name)
        return end, start

    async def _located(self, caller: Caller, job_id: JobId, path: str) -> tuple[str, ManifestFile]:
        """Return (key prefix, file) of a file of the last committed checkpoint. Raises NotFound."""
        located = await self.manifest(caller, job_id)
        file = next((f for f in located[1].files if f.path == path), None) if located else None
        if located is None or file is None:
            raise NotFound(f"job {job_id} has no artifact {path!r}; `gpubroker artifacts {job_id}` lists them")
        return located[0], file

    async def _held(self, caller: Caller, file: ManifestFile, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield the pieces of a file, whose memory counts until the client has read them. Raises TooMany."""
        with self._memory.hold(caller.team) as memory:
            memory.add(min(RANGE_BYTES, file.bytes))
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def _checked(self, key: str, file: ManifestFile, name: str) -> AsyncGenerator[bytes]:
        corrupt = _corrupt(name)
        digest, start = hashlib.sha256(), 0
        while True:
            size = min(RANGE_BYTES, file.bytes - start)
            last = start + size == file.bytes
            # read one byte beyond the end, to detect an object that is too long
            piece = await self._blobs.get_range(key, start, size + last)
            if piece is not None:
                await asyncio.to_thread(digest.update, piece)
            if piece is None or len(piece) != size or (last and digest.hexdigest() != file.sha256):
                log.error("%s", corrupt)  # for a large file, the client only gets a broken transfer
                raise corrupt
            yield piece
            if last:
                return
            start += size

    # ------------------------------------------------------------------------------------------------------------ logs

    async def attempt(self, caller: Caller, job: Job, number: int | None) -> Attempt | None:
        """Return an attempt by number, by default the latest, or None if there is none. Raises NotFound."""
        attempts = await self._service.attempts(caller, job)
        if number is None:
            return attempts[-1] if attempts else None
        return _numbered(job, attempts, number)

    @contextlib.asynccontextmanager
    async def log(
        self, caller: Caller, job: Job, number: int | None, part: LogPart = WHOLE_LOG
    ) -> AsyncGenerator[bytes]:
        """Return the log of an attempt (by default the latest) up to now, for the block. Raises NotFound, TooMany."""
        with self._memory.hold(caller.team) as memory:
            yield await self._log(caller, job, number, part, memory)

    async def _log(self, caller: Caller, job: Job, number: int | None, part: LogPart, memory: HeldMemory) -> bytes:
        check_kept(job, "logs")
        attempt = await self.attempt(caller, job, number)
        chunks = [c for c in await self._chunks(attempt.id) if part.includes(c.written_at)] if attempt else []
        texts: list[tuple[datetime | None, bytes]] = []
        size = lines = 0
        for chunk in reversed(chunks):
            texts.append((chunk.written_at, await self._text(chunk) or b""))
            memory.add(COPIES * len(texts[-1][1]))
            size += len(texts[-1][1])
            lines += texts[-1][1].count(b"\n")
            if part.tail is not None and lines > part.tail:
                break
            if size > LOG_BYTES:
                texts.append((None, f"(only the last {size} bytes of this log are shown)\n".encode()))
                break
        texts.reverse()
        log = await asyncio.to_thread(part.of, texts)
        memory.add(max(0, len(log) - size))  # times make a log of short lines longer
        return log

    async def _text(self, chunk: Chunk) -> bytes | None:
        """Return the text of a chunk, or None if it is absent. A chunk that is too large is replaced by a line."""
        try:
            return await self._blobs.get(chunk.key, max_bytes=CHUNK_BYTES)
        except BlobTooLarge as e:
            return f"(left out: {e})\n".encode()

    async def follow(
        self, caller: Caller, job: Job, number: int | None, position: Position
    ) -> AsyncIterator[LogPiece | None]:
        """Yield new log text after `position`, through later attempts, until the job ends.

        Yields None whenever there is nothing new.
        """
        store = self._service.rows(caller)
        while True:
            job = await store.job(job.id) or job
            attempts = await store.attempts(job.id)
            if number is not None:
                attempts = [_numbered(job, attempts, number)]
            current = position.current(attempts)
            if current is not None:
                chunks = position.unread(current.id, await self._chunks(current.id))
                for chunk in chunks:
                    data = await self._text(chunk)
                    position = position.after(current.id, chunk)
                    if data is not None:
                        text = data.decode(errors="replace")
                        yield LogPiece(position=position, attempt=current.number, node=chunk.node, text=text)
                if chunks:
                    continue
                if not current.live and current is not attempts[-1]:
                    position = Position(attempt=attempts[attempts.index(current) + 1].id)
                    continue
            if (number is not None and current is not None and not current.live) or _has_ended(job, current):
                return
            yield None
            await store.wait(f"job/{job.id}", self._service.settings.poll_s)

    async def _chunks(self, attempt: AttemptId) -> list[Chunk]:
        prefix = object_keys.logs(attempt)
        return chunks_of(await self._blobs.list(prefix, max_objects=MAX_LISTED), prefix)


def _corrupt(name: str) -> Corrupt:
    return Corrupt(f"{name} is not what its manifest says; the blob store lost or changed it")


async def _in_time(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    chunks = aiter(body)
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"no data arrived for {STALLED_S:g} s; send it again"
            raise InvalidInput(Problem(field="body", message=message)) from None
        yield chunk


def _numbered(job: Job, attempts: Sequence[Attempt], number: int) -> Attempt:
    attempt = next((a for a in attempts if a.number == number), None)
    if attempt is None:
        raise NotFound(f"job {job.id} has no attempt {number}; it has {len(attempts)}")
    return attempt


def _has_ended(job: Job, current: Attempt | None) -> bool:
    return job.state in RESTING_JOB_STATES and (current is None or not current.live)


def _format(name: str, declared: UploadFormat | None) -> UploadFormat:
    if declared is not None:
        return declared
    try:
        return format_of(name, None)
    except DataError:
        message = f"{name!r} has no known ending; add format=csv, json, jsonl, parquet, tar or zip"
        raise InvalidInput(Problem(field="name", message=message)) from None


def _parse(raw: bytes) -> Manifest | None:
    """Return a manifest, or None if it is invalid or names files outside its folder.

    A rented machine wrote it, so it is not trusted: 16 MB of wrong values took 22 s to refuse.
    """
    if raw.count(b",") > MANIFEST_COMMAS:
        return None
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError:
        return None
    safe = all(not f.path.startswith("/") and ".." not in f.path.split("/") for f in manifest.files)
    return manifest if safe else None
