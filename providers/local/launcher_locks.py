"""Who carries out creates, and proof of its death.

A launcher is a process of this host. It holds an flock on a file named after itself below the provider's state folder
for as long as it lives: the kernel lets go of it with the process, so neither a reused PID, nor a reboot, nor another
PID namespace (a restarted container) can make a dead launcher look alive or a living one dead.
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
    """This process as a launcher, and its view of the others that share `folder`."""

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self._folder = folder
        self._creating: Counter[str] = Counter()
        self.id = self._name_myself()
        self._lock = os.open(folder / self.id, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @staticmethod
    def _name_myself() -> str:
        """host, boot, PID and start time for people; the nonce, because one process may open a provider twice."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        started = int(psutil.Process().create_time())
        return f"{socket.gethostname()}.{boot}.{os.getpid()}.{started}.{os.urandom(4).hex()}"

    @contextmanager
    def creating(self, name: InstanceName) -> Iterator[None]:
        """While inside, a create of `name` may still happen."""
        self._creating[name] += 1
        try:
            yield
        finally:
            self._creating[name] -= 1
            if not self._creating[name]:
                del self._creating[name]

    def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        """DEAD only when `launched_by` can never again create `name`; UNKNOWN for one that another folder knows."""
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
        """Nothing may be created after this."""
        os.close(self._lock)
