"""Last step into a sandbox: gives up all rights and executes a program of the job.

Run as `python -m providers.local.confinement CONFINEMENT COMMAND...` for a shell of an isolated machine. The agent of
the machine takes the same step in `providers.local.sandbox`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypedDict

from providers.local import kernel_calls


class Confinement(TypedDict):
    """Rights of a job's processes."""

    uid: int | None
    """User and group id of the processes; None: those of the user namespace, which have no rights outside."""
    groups: list[int]
    """Supplementary groups, which own GPU devices."""
    folder: str
    """Working folder."""
    link_folders: list[str]
    """Folders in which the job may create links, FIFOs and sockets."""


def run_confined(confinement: Confinement, command: Sequence[str]) -> NoReturn:
    """Replace this process with `command`, without any capability. Raises OSError."""
    os.chdir(confinement["folder"])
    kernel_calls.drop_bounding_set()
    if (uid := confinement["uid"]) is not None:
        os.setgroups(confinement["groups"])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel_calls.drop_capabilities()
    kernel_calls.refuse_new_privileges()
    kernel_calls.restrict_special_files(map(Path, confinement["link_folders"]))
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    run_confined(json.loads(sys.argv[1]), sys.argv[2:])
