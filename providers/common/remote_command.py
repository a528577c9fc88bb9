"""A command beside the agent on a rented machine, as one word for the shell at the other end of ssh."""

import shlex
from collections.abc import Sequence

CONTAINER = "gpubroker-trainer"
"""Name of the trainer's container where it is run by `docker run`."""
SHELL = ("bash", "-l")


def reaching(command: Sequence[str], *, docker_run: bool, tty: bool) -> str:
    """`command` quoted for the remote shell; empty: a login shell. In the trainer's container where there is one.

    As root everywhere, since that is what a look at somebody else's process takes.
    """
    wanted = list(command) or list(SHELL)
    if docker_run:
        wanted = ["sudo", "docker", "exec", "-it" if tty else "-i", "--user", "0:0", CONTAINER, *wanted]
    return shlex.join(wanted)
