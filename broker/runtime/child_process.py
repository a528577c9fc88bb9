"""Starts the daemon's Python subprocesses, which run in the root folder, in a session of their own, without secrets.

Relative entries of PYTHONPATH and LD_LIBRARY_PATH would name other folders there, so all paths are absolute.
"""

import asyncio
import os
import sys
from collections.abc import Sequence


async def start_child(command: Sequence[str], *, stdin: int, stderr: int) -> asyncio.subprocess.Process:
    """Start a subprocess whose stdout is a pipe and which imports the same modules as this process."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=_environment(),
        cwd="/",
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    environment = {"PYTHONPATH": _absolute(sys.path)}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environment[name] = _absolute(os.environ[name].split(os.pathsep))
    return environment


def _absolute(paths: Sequence[str]) -> str:
    return os.pathsep.join(os.path.abspath(path) for path in paths)
