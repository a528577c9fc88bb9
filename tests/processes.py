"""Processes on this host that run on behalf of a daemon's home."""

import os
from pathlib import Path

import psutil


def processes_of(home: Path) -> list[psutil.Process]:
    """Return everything alive that names the home in its arguments or environment."""
    found, name = [], str(home)
    for process in psutil.process_iter():
        try:
            told = " ".join(process.cmdline()) + " ".join(process.environ().values())
            if name in told and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
