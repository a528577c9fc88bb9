"""Output folder of a standalone run: created if missing, and locked by one run at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
STORE = "store"


class BadOutput(ValueError):
    """The folder cannot be used; the message names it and the fix."""


@contextlib.contextmanager
def holding(output: Path) -> Iterator[None]:
    """Lock the folder within the block, because two runs would remove each other's files.

    The kernel releases the lock of a dead process.

    Raises: BadOutput.
    """
    try:
        (output / STORE).mkdir(parents=True, exist_ok=True)
        lock = os.open(output / STORE / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileExistsError, NotADirectoryError):
        raise BadOutput(f"--output {output} is a file, or lies below one; name a folder") from None
    except OSError as e:
        raise BadOutput(f"--output {output} cannot be used ({e.strerror}); name a folder that may be written") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise BadOutput(
                f"--output {output} is in use by another run (process {holder}): wait for its end, stop it, or name "
                "another folder"
            ) from None
        with contextlib.suppress(OSError):  # disk full: the lock has no owner's name
            os.pwrite(lock, f"{os.getpid():<19}\n".encode(), 0)
        yield
    finally:
        os.close(lock)
