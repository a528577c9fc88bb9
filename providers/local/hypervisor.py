"""Hypervisor process of one local machine: `python -m providers.local.hypervisor FOLDER LOCK_FD PLAN_FD`.

The hypervisor holds the flock on FOLDER/lock as long as the machine runs. It starts the agent in a separate process
group, reaps orphaned processes, and kills all remaining processes when the machine ends. It outlives the daemon.
PLAN_FD is an anonymous file in memory, which passes secrets and vanishes once the hypervisor has read it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKE = {signal.SIGCHLD, signal.SIGTERM}
_LIBC = ctypes.CDLL(None, use_errno=True)


class HypervisorPlan(TypedDict):
    """Content of PLAN_FD, which the creator of the machine writes."""

    argv: list[str]
    env: dict[str, str]
    lifetime_s: float | None
    """Seconds from the start to the preemption; None: never preempted."""
    notice_s: float
    """Seconds of notice before the preemption; 0: no notice."""


def main() -> None:
    folder, lock, plan_fd = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(plan_fd) as file:
        file.seek(0)
        plan: HypervisorPlan = json.load(file)
    os.set_inheritable(lock, False)
    # If a destroy came before this point, the folder is absent or belongs to another machine: start nothing.
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):
            _write(folder / "exited", {"reason": _run(folder, plan), "at": time.time()})


def _run(folder: Path, plan: HypervisorPlan) -> str:
    """Run the machine until it ends and return the reason. All its processes have ended at the return."""
    started_at = time.monotonic()
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    agent = _start(folder, plan)
    dies_at = None if plan["lifetime_s"] is None else started_at + plan["lifetime_s"]
    warn_at = None if dies_at is None or not plan["notice_s"] else dies_at - plan["notice_s"]
    reason = ""
    while not reason:
        status = _reap(agent)
        now = time.monotonic()
        if status is not None:
            reason = f"exit code {os.waitstatus_to_exitcode(status)}"
        elif dies_at is not None and now >= dies_at:
            reason = "preempted"
        elif warn_at is not None and now >= warn_at:
            _write(folder / "notice", {"dies_at": dies_at})
            warn_at = None
        else:
            due_times = [at for at in (dies_at, warn_at) if at is not None]
            woken = signal.sigtimedwait(_WAKE, max(0.0, min(due_times) - now) if due_times else 3600.0)
            if woken is not None and woken.si_signo == signal.SIGTERM:
                reason = "switched off"
    _kill_all(agent)
    return reason


def _start(folder: Path, plan: HypervisorPlan) -> int:
    me = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:  # the hypervisor died before the prctl call took effect
            os._exit(1)

    with open(folder / "agent.log", "ab") as log:
        return subprocess.Popen(
            plan["argv"], env=plan["env"], cwd=folder / "work", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            process_group=0, preexec_fn=in_child,
        ).pid  # fmt: skip


def _reap(agent: int) -> int | None:
    """Reap all ended descendants. Return the wait status of the agent if it has ended, otherwise None."""
    newest = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == agent:
                newest = status
    return newest


def _kill_all(agent: int) -> None:
    """Send SIGKILL to the agent's process group, then to all descendants that have left the group.

    This process is a subreaper, so each orphan is a descendant of it.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(agent, signal.SIGKILL)
    myself = psutil.Process()
    while children := myself.children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        _reap(agent)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(agent)


def _write(path: Path, content: dict[str, object]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
