"""Use case: a data set of the Hub or of an allowed host becomes an upload of the caller, read by the daemon."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from broker.api.core.auth import Caller
from broker.api.core.problems import TooLarge
from broker.api.core.upload_spool import IMPORT_PREFIX, check_disk_space, full_disk_refused, run_to_end
from broker.api.imports.data_fetch import FIELD, DataFetcher, RemoteFile, refused
from broker.api.schemas.queries import UploadFormat
from broker.api.service.content import Content
from broker.api.service.jobs import Service
from broker.domain.errors import InvalidInput, Problem
from broker.ports import Upload
from broker.runtime.private_files import private_folder
from trainer.dataset import archives

TOTAL_S = 900.0
"""Maximum seconds of one import."""
PIECE_BYTES = 1 << 20


class DataImports:
    """Imports data sets. The limits of uploads apply: bytes, number at once, and the checks of the content."""

    def __init__(self, service: Service, content: Content) -> None:
        self._service = service
        self._content = content
        self._fetcher = DataFetcher(service.settings.data_hosts, service.settings.hub)

    async def fetch(self, caller: Caller, source: str, declared: UploadFormat | None) -> Upload:
        """Read, check and store a data set. Several files become one .tar. Raises as `Content.upload`."""
        try:
            async with self._content.upload_turn(caller.team), asyncio.timeout(TOTAL_S):
                files = await self._fetcher.files(source)
                if len(files) > 1:
                    return await self._packed(caller, files)
                name = files[0].name.rpartition("/")[2]
                async with aclosing(self._fetcher.read(files[0])) as body:
                    return await self._content.upload_in_turn(caller, name, declared, body, sha256=None)
        except TimeoutError:
            raise refused(f"was not read within {TOTAL_S:g} s; upload the file instead") from None
        except InvalidInput as error:
            raise InvalidInput(*(_of_source(problem) for problem in error.problems)) from None

    async def _packed(self, caller: Caller, files: Sequence[RemoteFile]) -> Upload:
        spool = self._service.settings.spool
        with full_disk_refused(spool):
            private_folder(spool)
        with full_disk_refused(spool), tempfile.TemporaryDirectory(dir=spool, prefix=IMPORT_PREFIX) as folder:
            local, left = dict[str, Path](), self._service.settings.upload_bytes
            for number, file in enumerate(files):
                local[file.name] = Path(folder) / f"{number}"
                left -= await self._saved(file, local[file.name], left)
            archive = Path(folder) / "data.tar"
            check_disk_space(archive.parent, self._service.settings.upload_bytes - left)
            await run_to_end(partial(_pack, local, archive))
            async with aclosing(_file_pieces(archive)) as body:
                return await self._content.upload_in_turn(caller, "data.tar", "tar", body, sha256=None)

    async def _saved(self, file: RemoteFile, path: Path, max_bytes: int) -> int:
        """Save a file of at most `max_bytes` bytes; return its size. Raises TooLarge, StorageFull, InvalidInput."""
        size = 0
        async with aclosing(self._fetcher.read(file)) as body:
            with path.open("wb") as target:
                async for piece in body:
                    size += len(piece)
                    if size > max_bytes:
                        limit = self._service.settings.upload_bytes
                        raise TooLarge(f"the data set has more than {limit} bytes; name fewer files by /pattern")
                    check_disk_space(path.parent, len(piece))
                    await run_to_end(partial(target.write, piece))
        return size


def _pack(files: dict[str, Path], archive: Path) -> None:
    with archive.open("wb") as target:
        archives.pack(files, target)


async def _file_pieces(path: Path) -> AsyncGenerator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


def _of_source(problem: Problem) -> Problem:
    """Return a fault of the file's name or content as one of its source."""
    return Problem(field=FIELD, message=problem.message) if problem.field in ("name", "body", "") else problem
