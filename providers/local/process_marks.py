"""Processes that were born into an instance: they carry its folder in their environment, wherever they went."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

INSTANCE = "GPUBROKER_INSTANCE"
INSTANCE_DIR = "GPUBROKER_INSTANCE_DIR"
_PATIENCE_S = 10.0


def instances_with_processes(root: Path) -> set[str]:
    """Names of the instances below `root` that have a living process."""
    return {folder.name for _, folder in _marked() if folder.parent == root}


def kill_instance(folder: Path, held: Callable[[], bool]) -> tuple[int, bool]:
    """SIGKILLs every process of the instance until none is left: (how many there were, whether that succeeded).

    Its own are those that carry the mark, those of a marked process's session, and all their descendants, so that
    a program which clears its environment is found as well. `held`: whether the machine's lock is; a hypervisor has
    that before its environment can be read.
    """
    deadline = time.monotonic() + _PATIENCE_S
    killed: set[psutil.Process] = set()
    sessions: set[int] = set()
    while (victims := _victims(folder, sessions)) or held():
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
    """`sessions` grows by those of the marked processes."""
    marked = {process for process, at in _marked() if at == folder}
    found = set(marked)
    for process in marked:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if (session := os.getsid(process.pid)) != os.getsid(0):
                sessions.add(session)
            found |= set(process.children(recursive=True))
    for pid in psutil.pids() if sessions else ():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions:
                found.add(psutil.Process(pid))
    return {process for process in found if _lives(process)}


def _marked() -> Iterator[tuple[psutil.Process, Path]]:
    """Reads every environment, but makes a Process of the few that matter only: this runs with every listing."""
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
