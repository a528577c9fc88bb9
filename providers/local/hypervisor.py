"""The hypervisor of one real instance: `python -m providers.local.hypervisor FOLDER LOCK_FD PLAN_FD`.

It holds the flock on FOLDER/lock for as long as the machine lives, starts the agent in a process group of its own,
reaps whatever the agent leaves behind, and takes everything away at the moment of preemption. It outlives the daemon.
Secrets arrive in PLAN_FD, an anonymous file in memory that goes away when it was read.
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
    """What the creator hands over."""

    argv: list[str]
    env: dict[str, str]
    lifetime_s: float | None
    notice_s: float


def main() -> None:
    folder, lock, plan_fd = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(plan_fd) as file:
        file.seek(0)
        plan: HypervisorPlan = json.load(file)
    os.set_inheritable(lock, False)
    # A creator that was overtaken by destroy must not start anything: its folder is gone, or another's.
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):
            _write(folder / "exited", {"reason": _run(folder, plan), "at": time.time()})


def _run(folder: Path, plan: HypervisorPlan) -> str:
    """Runs the machine to its end; why it ended. Nothing of it is left when this returns."""
    born = time.monotonic()
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    agent = _start(folder, plan)
    dies_at = None if plan["lifetime_s"] is None else born + plan["lifetime_s"]
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
            due = [at for at in (dies_at, warn_at) if at is not None]
            woken = signal.sigtimedwait(_WAKE, max(0.0, min(due) - now) if due else 3600.0)
            if woken is not None and woken.si_signo == signal.SIGTERM:
                reason = "switched off"
    _take_away(agent)
    return reason


def _start(folder: Path, plan: HypervisorPlan) -> int:
    me = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:  # the hypervisor died before that took effect
            os._exit(1)

    with open(folder / "agent.log", "ab") as log:
        return subprocess.Popen(
            plan["argv"], env=plan["env"], cwd=folder / "work", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            process_group=0, preexec_fn=in_child,
        ).pid  # fmt: skip


def _reap(agent: int) -> int | None:
    """Reaps every ended descendant; the agent's wait status if it was among them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == agent:
                found = status
    return found


def _take_away(agent: int) -> None:
    """SIGKILLs the group at once, then what had left it: as a subreaper, every orphan is below this process."""
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
