"""Files and folders that only their owner can read; files are written atomically."""

import errno
import fcntl
import os
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers of an OSError which mean that the disk takes no more data."""


def private_folder(folder: Path) -> None:
    """Create the folder and its missing parents with mode 0700; an existing folder keeps its mode.

    `Path.mkdir(parents=True)` applies the mode to the last folder only, but a parent may be the daemon's home, which
    must be private too. Raises OSError.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def is_locked(file: Path) -> bool:
    """Return True if a process holds an exclusive flock on `file`; False also if `file` does not exist.

    The check takes a shared lock, so that two simultaneous checks both return False.
    """
    try:
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def write_private(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file with mode 0600 atomically, by renaming a temporary file; missing folders get mode 0700.

    `durable`: the file survives a power cut. Raises OSError, and then leaves no temporary file.
    """
    private_folder(path.parent)
    fresh = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
