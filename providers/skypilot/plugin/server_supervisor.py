"""Supervisor process of one SkyPilot API server: `python -m gpubroker_skypilot.server_supervisor LOCK_FD PORT LOG`.

The supervisor starts the server, reaps its orphaned processes, and exits with the server. At its exit it kills all
remaining processes, because workers of a dead server would finish launches that no daemon tracks.
LOCK_FD is the server's lock file, on which each process of the server holds a shared flock. LOG is the file that all
processes print to; the supervisor limits its size. The supervisor outlives the daemon.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKE = {signal.SIGCHLD, signal.SIGTERM}
MAX_LOG_BYTES = 16 * 1024**2
"""Size above which the log is copied to LOG.1, which replaces the previous LOG.1, and then emptied."""
LOG_CHECK_S = 60.0
"""Seconds between two checks of the log's size."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    lock, port, log = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    os.set_inheritable(lock, False)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    server = _start(port)
    while not _reap(server):
        rotate(log)
        woken = signal.sigtimedwait(_WAKE, LOG_CHECK_S)
        if woken is not None and woken.si_signo == signal.SIGTERM:
            break
    _kill_descendants()


def rotate(log: Path) -> None:
    """Copy a log that is too long to LOG.1 and truncate it.

    A rename would not help: each process keeps appending to the file that it has open.
    """
    with suppress(OSError):
        if log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _start(port: str) -> int:
    supervisor = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:  # the supervisor died before the prctl call took effect
            os._exit(1)

    argv = [sys.executable, "-m", "sky.server.server", "--host", "127.0.0.1", "--port", port]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=in_child).pid


def _reap(server: int) -> bool:
    """Reap every ended descendant and return True if the server was one of them."""
    ended = False
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended = ended or pid == server
    return ended


def _kill_descendants() -> None:
    """Send SIGKILL to all descendants. This process is a subreaper, so each orphan is a descendant of it."""
    supervisor = psutil.Process()
    while children := supervisor.children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(0)


if __name__ == "__main__":
    main()
