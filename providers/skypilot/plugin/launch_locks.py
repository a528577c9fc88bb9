"""Lock files that show on which clusters the workers of SkyPilot's API server act.

The daemon reads them through the plugin's HTTP routes; the workers hold them.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .shared import LAUNCHING


@contextmanager
def launch_lock(state: Path, cluster: str) -> Iterator[None]:
    """Hold a shared flock on the cluster's file while a worker acts on the cluster.

    The status of a request does not show this: a request is marked as cancelled before its worker has stopped.
    """
    path = state / LAUNCHING / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock.fileno()).st_nlink == 0:  # The last worker of this cluster has just removed the file.
                continue
            try:
                yield
            finally:
                _remove_unless_locked(path, lock.fileno())
            return


def is_launching(state: Path, cluster: str) -> bool:
    return is_locked(state / LAUNCHING / cluster)


def remove_stale_launch_files(state: Path) -> None:
    """Remove the files of clusters whose workers were killed."""
    for path in (state / LAUNCHING).glob("*"):
        with path.open("rb") as lock:
            _remove_unless_locked(path, lock.fileno())


def _remove_unless_locked(path: Path, lock: int) -> None:
    """Remove the file unless another worker, or a check, holds a lock on it."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            path.unlink()


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
