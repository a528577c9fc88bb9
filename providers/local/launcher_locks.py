"""Lock files that prove whether a launcher, a process of this host that creates machines, is alive.

Each launcher holds an flock on a file in the provider's state folder; the launcher's id is the name of the file. The
kernel releases the lock when the process ends. The proof is therefore correct after a reboot, with a reused PID, and
in another PID namespace (a restarted container).
"""

import fcntl
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from broker.domain.ids import InstanceName
from broker.domain.instance import Liveness
from broker.runtime.private_files import private_folder


class LauncherLocks:
    """Lock of this process as a launcher, and checks of all launchers that share `folder`."""

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self._folder = folder
        self._creating: Counter[str] = Counter()
        self.id = self._name_myself()
        self._lock = os.open(folder / self.id, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @staticmethod
    def _name_myself() -> str:
        """Return the launcher's id: host, boot, PID and start time for operators, then a nonce.

        The nonce is needed because one process may open a provider twice.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        started = int(psutil.Process().create_time())
        return f"{socket.gethostname()}.{boot}.{os.getpid()}.{started}.{os.urandom(4).hex()}"

    @contextmanager
    def creating(self, name: InstanceName) -> Iterator[None]:
        """Report this launcher as ALIVE for `name` inside the context, in which a create may still happen."""
        self._creating[name] += 1
        try:
            yield
        finally:
            self._creating[name] -= 1
            if not self._creating[name]:
                del self._creating[name]

    def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        """Return DEAD only if `launched_by` can never create `name` again.

        UNKNOWN: the folder has no file of that launcher; the launcher may use another folder.
        """
        if launched_by == self.id:
            return Liveness.ALIVE if name in self._creating else Liveness.DEAD
        if not launched_by or "/" in launched_by:
            return Liveness.UNKNOWN
        try:
            lock = os.open(self._folder / launched_by, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return Liveness.UNKNOWN
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Liveness.ALIVE
        finally:
            os.close(lock)
        return Liveness.DEAD

    def close(self) -> None:
        """Release the lock. This launcher must create nothing afterwards."""
        os.close(self._lock)
