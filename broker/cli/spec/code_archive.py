"""Pack a code folder into a reproducible tar: equal contents give equal bytes, and thus the same upload."""

import os
import stat
import tarfile
from pathlib import Path
from typing import BinaryIO

from broker.cli.core.exit_codes import BadInput

SKIPPED = frozenset(
    {".git", ".hg", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules"}
)
MAX_BYTES = 512 * 1024**2


def pack(folder: Path, into: BinaryIO) -> None:
    """Write the folder as a tar with sorted names and fixed times, owners and modes.

    The executable bit is kept, and relative links inside the folder stay links.
    Raises BadInput if the folder is missing, empty or too big, or has a special file or a link to the outside.
    """
    if not os.path.isdir(folder):
        raise BadInput(f"script.code: {folder} is not a folder; give the folder that holds the program")
    files = sorted(_files(folder), key=lambda f: f.relative_to(folder).as_posix())
    if not files:
        raise BadInput(f"script.code: {folder} is empty; give the folder that holds the program")
    size = sum(f.lstat().st_size for f in files)
    if size > MAX_BYTES:
        raise BadInput(
            f"script.code: {folder} holds {size} bytes, more than {MAX_BYTES}; keep data out of the code folder"
        )
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            _add(tar, file, folder)


def _files(folder: Path) -> list[Path]:
    files: list[Path] = []
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            if child.name not in SKIPPED:
                files.extend(_files(child))
        elif child.suffix != ".pyc":
            files.append(child)
    return files


def _add(tar: tarfile.TarFile, file: Path, folder: Path) -> None:
    status = file.lstat()
    entry = tarfile.TarInfo(file.relative_to(folder).as_posix())
    entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    if stat.S_ISLNK(status.st_mode):
        if file.readlink().is_absolute() or not file.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"script.code: {file} links out of the folder or by an absolute path; copy the file in")
        entry.type, entry.linkname = tarfile.SYMTYPE, str(file.readlink())
        tar.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        entry.size = status.st_size
        with file.open("rb") as data:
            tar.addfile(entry, data)
    else:
        raise BadInput(f"script.code: {file} is neither a file nor a link; remove it from the folder")
