"""Files and folders that nobody but their owner reads; a file is there whole or not at all."""

import errno
import fcntl
import os
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Of an OSError: nothing can be written there."""


def private_folder(folder: Path) -> None:
    """Makes it with mode 0700, and so those above it: `mkdir` gives its mode to the last one only, and the first of
    them may be the daemon's home. One that is there stays as it is. Raises OSError.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def is_locked(file: Path) -> bool:
    """Whether somebody holds this lock; shared, so that two who look do not see each other."""
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
    """Mode 0600, by renaming; folders that are missing get 0700. `durable`: it outlasts a power cut.

    Raises OSError, and then leaves nothing.
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
