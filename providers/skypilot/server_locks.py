"""Which SkyPilot API servers of a state folder live, and which names their workers act on: files that they lock.

Every server has an id and a file named after it, under a shared flock of each of its processes: an exclusive one proves
that all of them are gone, in any PID namespace. The file is removed then, and as an id names its folder, one of ours
without a file is a dead server's. The mark of a server in its processes' environment is a second proof.
"""

import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from broker.domain.errors import OutcomeUnknown
from broker.runtime.private_files import private_folder
from providers.skypilot.shared import DEAD, LAUNCHING, LOCK, SERVERS

KILL_S = 15.0


class ServerLocks:
    """The servers of one state folder."""

    def __init__(self, state: Path) -> None:
        self._servers = state / SERVERS
        private_folder(self._servers)
        self._folder = _name_of(state)

    def new(self) -> tuple[str, int]:
        """An id and its file under a shared lock of ours, until a keeper has taken that over."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        server = f"{socket.gethostname()}.{boot}.{self._folder}.{os.urandom(4).hex()}"
        lock = os.open(self._servers / server, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return server, lock

    def drop(self, server: str, lock: int) -> None:
        """Of one that was never started."""
        (self._servers / server).unlink(missing_ok=True)
        os.close(lock)

    def is_proven_dead(self, server: str) -> bool:
        """Whether it is proven that no process of `server` lives or will; for servers of this folder only."""
        if not server or "/" in server:
            return False
        try:
            lock = os.open(self._servers / server, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return server.rsplit(".", 2)[1:-1] == [self._folder] and not marked(server)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            os.pwrite(lock, DEAD, 0)
            os.fsync(lock)
        finally:
            os.close(lock)
        return not marked(server)

    def free(self, server: str) -> bool:
        """Whether nobody holds the server's file any more."""
        return not _held(self._servers / server)

    def reap(self, but: str) -> None:
        """What other servers left behind finishes launches and holds ports: it ends. Raises OutcomeUnknown."""
        for path in self._servers.iterdir():
            if path.name != but:
                kill_all(path.name)
                if self.is_proven_dead(path.name):
                    path.unlink(missing_ok=True)


def _name_of(state: Path) -> str:
    """Of the folder, in the ids of all servers that it ever had."""
    path, mine = state / "folder", os.urandom(4).hex()
    if not path.exists():
        fresh = path.with_name(f"folder.{mine}")
        fresh.write_text(mine)
        with suppress(FileExistsError):
            os.link(fresh, path)  # whole or not at all, and whoever is first
        fresh.unlink()
    return path.read_text()


# -------------------------------------------------------------------------------------------------------------- names


@contextmanager
def launch_lock(state: Path, cluster: str) -> Iterator[None]:
    """A shared flock on the cluster's name while a worker acts on it, which a request's status does not tell:
    a cancelled one is marked before its worker has stopped.
    """
    path = state / LAUNCHING / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock.fileno()).st_nlink == 0:  # its last worker has just removed it
                continue
            try:
                yield
            finally:
                _remove(path, lock.fileno())
            return


def is_launching(state: Path, cluster: str) -> bool:
    return _held(state / LAUNCHING / cluster)


def tidy(state: Path) -> None:
    """Names that workers had when they were killed."""
    for path in (state / LAUNCHING).glob("*"):
        with path.open("rb") as lock:
            _remove(path, lock.fileno())


def _remove(path: Path, lock: int) -> None:
    """Unless another worker, or somebody who looks, has it locked."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            path.unlink()


def _held(path: Path) -> bool:
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


# ---------------------------------------------------------------------------------------------------------- processes


def mark_of(pid: int) -> str | None:
    """The server that a process belongs to; None for one that is gone, or is nobody's we may look at."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    mark = f"{LOCK}=".encode()
    return next((line[len(mark) :].decode() for line in raw.split(b"\0") if line.startswith(mark)), None)


def marked(server: str) -> list[int]:
    return [pid for pid in psutil.pids() if mark_of(pid) == server]


def kill_all(server: str) -> None:
    """SIGKILLs every process that carries the server's mark, until none is left. Raises OutcomeUnknown."""
    deadline = time.monotonic() + KILL_S
    while victims := [pid for pid in marked(server) if _lives(pid)]:
        if time.monotonic() > deadline:
            raise OutcomeUnknown(f"processes of SkyPilot's API server do not end: {victims}; kill them")
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
