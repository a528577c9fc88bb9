"""The keeper of one SkyPilot API server: `python -m providers.skypilot.server_keeper LOCK_FD PORT LOG`.

It starts the server, reaps whatever that leaves behind, and ends with it, taking everything away: a dead server's
workers would finish launches that nobody knows of. LOCK_FD is the server's file under a shared flock, as each of its
processes holds one. LOG is the file that all of them print to, which is kept within bounds. It outlives the daemon.
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
LOG_BYTES = 16 * 1024**2
"""A longer log becomes LOG.1, in place of the one before."""
LOG_S = 60.0
"""Between two looks at its length."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    lock, port, log = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    os.set_inheritable(lock, False)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    server = _start(port)
    while not _reap(server):
        shorten(log)
        woken = signal.sigtimedwait(_WAKE, LOG_S)
        if woken is not None and woken.si_signo == signal.SIGTERM:
            break
    _take_away()


def shorten(log: Path) -> None:
    """By a copy, not by a new name: every process goes on appending to the file that it was given."""
    with suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _start(port: str) -> int:
    me = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:  # the keeper died before that took effect
            os._exit(1)

    argv = [sys.executable, "-m", "sky.server.server", "--host", "127.0.0.1", "--port", port]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=in_child).pid


def _reap(server: int) -> bool:
    """Reaps every ended descendant; whether the server was among them."""
    ended = False
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended = ended or pid == server
    return ended


def _take_away() -> None:
    """SIGKILLs everything: as a subreaper, every orphan is below this process."""
    myself = psutil.Process()
    while children := myself.children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(0)


if __name__ == "__main__":
    main()
