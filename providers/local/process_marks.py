"""Finds and kills all processes of a local machine by two environment variables that child processes inherit."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

INSTANCE = "GPUBROKER_INSTANCE"
"""Variable with the name of the machine."""
INSTANCE_DIR = "GPUBROKER_INSTANCE_DIR"
"""Variable with the folder of the machine, by which a process is assigned to its machine."""
_KILL_TIMEOUT_S = 10.0
"""Seconds within which killed processes must end."""


def instances_with_processes(root: Path) -> set[str]:
    """Return the names of the machines below `root` that have a running process."""
    return {folder.name for _, folder in _marked() if folder.parent == root}


def namespace_init(folder: Path) -> int | None:
    """Return the PID of the first process of an isolated machine, or None if it does not run.

    That process has two PIDs: the returned one on the host, and 1 in its namespace. If the job creates a nested
    namespace, the first process there has three PIDs.
    """
    for process, at in _marked():
        if at == folder:
            with suppress(OSError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text()
                pids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
                if len(pids) == 2 and pids[1] == "1":
                    return process.pid
    return None


def kill_instance(folder: Path, is_held: Callable[[], bool]) -> tuple[int, bool]:
    """Send SIGKILL to all processes of the machine until none is left.

    Returns the number of killed processes, and False if some still run after `_KILL_TIMEOUT_S`.

    Processes of the machine are those with the mark, those in the session of a marked process, and descendants of
    marked processes. This includes programs that clear their environment. `is_held`: returns True while the machine's
    lock is held. A starting hypervisor holds the lock before its environment can be read.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    killed: set[psutil.Process] = set()
    sessions: set[int] = set()
    # The first process of a namespace that only waits for the others to end has no environment, and therefore no mark.
    while (victims := _victims(folder, sessions) | {process for process in killed if _lives(process)}) or is_held():
        if time.monotonic() > deadline:
            return len(killed), False
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed |= victims
        psutil.wait_procs(list(victims), timeout=0.05)
        if not victims:
            time.sleep(0.005)
    return len(killed), True


def _victims(folder: Path, sessions: set[int]) -> set[psutil.Process]:
    """Return the running processes of the machine. Adds the sessions of marked processes to `sessions`."""
    marked = {process for process, at in _marked() if at == folder}
    processes = set(marked)
    for process in marked:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if (session := os.getsid(process.pid)) != os.getsid(0):
                sessions.add(session)
            processes |= set(process.children(recursive=True))
    for pid in psutil.pids() if sessions else ():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions:
                processes.add(psutil.Process(pid))
    return {process for process in processes if _lives(process)}


def _marked() -> Iterator[tuple[psutil.Process, Path]]:
    """Yield each process that has the mark, and its machine's folder.

    Searches the raw environment first, because creating a `psutil.Process` is slow and each listing runs this function.
    """
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            if INSTANCE_DIR.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                process = psutil.Process(pid)
                if folder := process.environ().get(INSTANCE_DIR):
                    yield process, Path(folder)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
