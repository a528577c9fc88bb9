"""Quote a command that runs next to the agent on a rented machine, for the remote shell of ssh."""

import shlex
from collections.abc import Sequence

CONTAINER = "gpubroker-trainer"
"""Name of the trainer's container if `docker run` starts it."""
SHELL = ("bash", "-l")


def reaching(command: Sequence[str], *, docker_run: bool, tty: bool) -> str:
    """Return `command` quoted for the remote shell, inside the trainer's container if it exists; empty: a login shell.

    The command runs as root, because inspecting another user's process requires it.
    """
    words = list(command) or list(SHELL)
    if docker_run:
        words = ["sudo", "docker", "exec", "-it" if tty else "-i", "--user", "0:0", CONTAINER, *words]
    return shlex.join(words)
