"""Archives of pictures, read in place.

Nothing is unpacked to a disk, so a name in an archive cannot write outside a folder.
"""

import hashlib
import io
import lzma
import stat
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Endings of files that are treated as pictures; other files are ignored."""
METADATA = ("metadata.csv", "metadata.jsonl")
"""Files that describe the pictures in their folder; the column `file_name` names a picture."""
MAX_FILES = 1_000_000
MAX_BYTES = 64 * 1024**2
"""Largest size of one file in bytes. A file that declares more is refused before it is unpacked."""
MAX_RATIO, RATIO_FREE_BYTES = 200, 16 << 20
"""Maximum ratio of the unpacked to the packed bytes of a file. A file of RATIO_FREE_BYTES may exceed the ratio."""
_UNREADABLE = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError,
    OverflowError, LookupError, struct.error, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""Errors that the libraries raise for a damaged archive: offsets, lengths and dates may have any value."""
_READING = threading.Lock()
"""Lock on the archive's single file position, because a second thread reads the rows of the next step."""


class BadArchive(ValueError):
    """Error of an archive or of a file in it. The message continues a line that begins with the file's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """File of an archive, read on demand."""

    name: str
    size: int
    """Bytes of the file."""
    start: Callable[[int], bytes]
    """Function that returns the first bytes, at most as many as given. Raises OSError, BadArchive."""
    crc: int | None = None
    """CRC of the bytes, if the archive stores it."""
    stream: Callable[[], BinaryIO] | None = None
    """Function that opens the whole file as a stream of any size. Raises OSError, BadArchive."""

    def __str__(self) -> str:
        return self.name

    def read(self) -> bytes:
        """Return the whole content. Raises: BadArchive, OSError."""
        if self.size > MAX_BYTES:
            raise BadArchive(f"has {self.size} bytes, more than {MAX_BYTES}; make it smaller")
        return self.start(self.size)

    def opened(self) -> BinaryIO:
        """Open the file for reading in pieces. Raises: OSError, BadArchive."""
        return self.stream() if self.stream else io.BytesIO(self.read())

    @property
    def content(self) -> str:
        """Return a value that is equal for files with the same bytes. Raises: OSError."""
        if self.crc is None:
            return hashlib.sha256(self.start(MAX_BYTES)).hexdigest()
        return f"{self.crc:08x} {self.size}"


def files(data: bytes | Path, kind: str) -> dict[str, Picture]:
    """Return the files of a .tar or .zip by name, sorted by name, without links and hidden files.

    Raises: BadArchive if the archive cannot be read, names a path outside of it, or has more than MAX_FILES files.
    """
    source = io.BytesIO(data) if isinstance(data, bytes) else data.open("rb")
    pictures: dict[str, Picture] = {}
    try:
        for number, picture in enumerate((_tar if kind == "tar" else _zip)(source), 1):
            if number > MAX_FILES:
                raise BadArchive(f"has more than {MAX_FILES} files; split it")
            path = PurePosixPath(picture.name)
            if path.is_absolute() or ".." in path.parts or "\\" in picture.name or "\0" in picture.name:
                raise BadArchive(f"names {picture.name!r}, which is outside the archive; pack the folder again")
            if not any(part.startswith((".", "__MACOSX")) for part in path.parts):
                pictures[str(path)] = picture
    except BadArchive:
        raise
    except _UNREADABLE as e:
        form = "a plain .tar (of tar -cf, not compressed)" if kind == "tar" else "a .zip"
        raise BadArchive(f"is not {form} that can be read ({type(e).__name__}); pack the folder again") from None
    return dict(sorted(pictures.items()))


def _tar(source: BinaryIO) -> Iterator[Picture]:
    with tarfile.open(fileobj=source, mode="r:") as tar:
        for member in tar:
            if member.isreg() and not member.issparse():
                place = source, member.offset_data, member.size
                yield Picture(
                    name=member.name, size=member.size, start=_section(*place), stream=partial(_window, *place)
                )


class _ArchiveWindow(io.RawIOBase):
    """Read-only stream of a byte range of an open file."""

    def __init__(self, source: BinaryIO, offset: int, size: int) -> None:
        self._source, self._offset, self._size, self._at = source, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        with _READING:
            self._source.seek(self._offset + self._at)
            data = self._source.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _window(source: BinaryIO, offset: int, size: int) -> BinaryIO:
    return io.BufferedReader(_ArchiveWindow(source, offset, size), 1 << 16)


def _section(source: BinaryIO, offset: int, size: int) -> Callable[[int], bytes]:
    def start(count: int) -> bytes:
        try:
            with _READING:
                source.seek(offset)
                return source.read(min(count, size))
        except _UNREADABLE as e:
            raise _not_unpacked(e) from None

    return start


def _zip(source: BinaryIO) -> Iterator[Picture]:
    archive = zipfile.ZipFile(source)
    for member in archive.infolist():
        if member.flag_bits & 1:
            raise BadArchive("is encrypted; pack it without a password")
        if member.file_size > max(RATIO_FREE_BYTES, MAX_RATIO * member.compress_size):
            raise BadArchive(f"unpacks {member.filename[:80]!r} to {member.file_size} bytes; pack less repetitive data")
        if not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16):
            start = _unpacked(archive, member)
            yield Picture(name=member.filename, size=member.file_size, start=start, crc=member.CRC)


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Callable[[int], bytes]:
    """Return a function that unpacks at most the requested bytes, even if the archive declares a wrong size."""

    def start(count: int) -> bytes:
        try:
            with archive.open(member) as opened:
                return opened.read(count)
        except _UNREADABLE as e:
            raise _not_unpacked(e) from None

    return start


def _not_unpacked(error: Exception) -> BadArchive:
    return BadArchive(f"cannot be unpacked ({type(error).__name__}); pack it again")


def packed(folder: Path) -> bytes:
    """Return a folder's files as a .tar whose bytes depend on names and contents only. Raises: OSError."""
    buffer = io.BytesIO()
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    pack({path.relative_to(folder).as_posix(): path for path in paths}, buffer)
    return buffer.getvalue()


def pack(files: Mapping[str, Path], archive: BinaryIO) -> None:
    """Write `files` (path by name in the archive) to a .tar, except hidden files. Raises: OSError.

    The bytes depend on names, contents and order only. Files are copied in pieces, never read whole.
    """
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            if any(part.startswith(".") for part in PurePosixPath(name).parts):
                continue
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            with path.open("rb") as opened:
                tar.addfile(entry, opened)
