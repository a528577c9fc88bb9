"""Lock files that prove which SkyPilot API servers of a state folder run.

Each server has an id and a file of that name, on which each process of the server holds a shared flock. An exclusive
flock thus proves that all these processes have ended, in any PID namespace; `reap` then removes the file. An id
contains its folder's id, so an id of this folder without a file belongs to a dead server. Each proof also requires
that no process carries the server's id in its environment.
"""

import fcntl
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from broker.domain.errors import OutcomeUnknown
from broker.runtime.private_files import private_folder
from providers.skypilot.plugin.launch_locks import is_locked
from providers.skypilot.plugin.shared import DEAD, LOCK, SERVERS

KILL_S = 15.0
"""Seconds within which killed processes must end."""


class ServerLocks:
    """Lock files of the servers of one state folder."""

    def __init__(self, state: Path) -> None:
        self._servers = state / SERVERS
        private_folder(self._servers)
        self._folder = _folder_id(state)

    def new(self) -> tuple[str, int]:
        """Return a new server id, and the descriptor of its file with a shared lock, which the supervisor inherits."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        server = f"{socket.gethostname()}.{boot}.{self._folder}.{os.urandom(4).hex()}"
        lock = os.open(self._servers / server, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return server, lock

    def drop(self, server: str, lock: int) -> None:
        """Remove the file of a server that was never started."""
        (self._servers / server).unlink(missing_ok=True)
        os.close(lock)

    def is_proven_dead(self, server: str) -> bool:
        """Return True if no process of `server` runs or will ever run.

        Returns False for servers of other folders, whose processes cannot be checked.
        """
        if not server or "/" in server:
            return False
        try:
            lock = os.open(self._servers / server, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return server.rsplit(".", 2)[1:-1] == [self._folder] and not marked_pids(server)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            os.pwrite(lock, DEAD, 0)
            os.fsync(lock)
        finally:
            os.close(lock)
        return not marked_pids(server)

    def is_unlocked(self, server: str) -> bool:
        """Return True if no process holds a lock on the server's file."""
        return not is_locked(self._servers / server)

    def reap(self, except_server: str) -> None:
        """Kill all processes of other servers, because they would finish launches and hold ports.

        Raises OutcomeUnknown if a process does not end.
        """
        for path in self._servers.iterdir():
            if path.name != except_server:
                kill_all(path.name)
                if self.is_proven_dead(path.name):
                    path.unlink(missing_ok=True)


def _folder_id(state: Path) -> str:
    """Return the id of the state folder, which is part of the ids of all its servers; create it if missing."""
    path, new_id = state / "folder", os.urandom(4).hex()
    if not path.exists():
        fresh = path.with_name(f"folder.{new_id}")
        fresh.write_text(new_id)
        with suppress(FileExistsError):
            os.link(fresh, path)  # A link is atomic, and the first of several processes wins.
        fresh.unlink()
    return path.read_text()


# ---------------------------------------------------------------------------------------------------------- processes


def server_of(pid: int) -> str | None:
    """Return the id of the server that a process belongs to.

    None: the process has ended, belongs to no server, or its environment may not be read.
    """
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    mark = f"{LOCK}=".encode()
    return next((line[len(mark) :].decode() for line in raw.split(b"\0") if line.startswith(mark)), None)


def marked_pids(server: str) -> list[int]:
    return [pid for pid in psutil.pids() if server_of(pid) == server]


def kill_all(server: str) -> None:
    """Send SIGKILL to all processes of the server until none is left. Raises OutcomeUnknown after `KILL_S`."""
    deadline = time.monotonic() + KILL_S
    while victims := [pid for pid in marked_pids(server) if _is_running(pid)]:
        if time.monotonic() > deadline:
            raise OutcomeUnknown(f"processes of SkyPilot's API server do not end: {victims}; kill them")
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
