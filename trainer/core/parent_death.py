"""Binds a process to its parent: when the parent dies, also by SIGKILL, the kernel kills the process.

Run as a file, it binds itself and becomes the given program: `python parent_death.py PARENT_PID PROGRAM ARG...`.
PR_SET_PDEATHSIG survives exec. A parent that died before the call is detected by its id.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Die with `parent`, which must be this process's parent."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Adopt processes below this one that lose their parent, so that they can be ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def make_undumpable() -> None:
    """Hide this process's environment and memory from other processes of the user, such as the user's own program."""
    _prctl(PR_SET_DUMPABLE, 0)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"cannot start {sys.argv[2]!r}: {error.strerror}; check script.command", file=sys.stderr)
        sys.exit(64)
