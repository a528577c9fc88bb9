"""Start one worker process for each GPU of this machine.

Usage: `python -m trainer.parallel.launch PROCESSES NODES NODE HOST:PORT RUN_FOLDER`.

The processes find each other by torch's variables, as with torchrun. torchrun itself is not used. It ends on SIGTERM
and Ctrl-C and kills processes that should save, waits 30 s for those that ignore the signal, and needs torch to start.
Elasticity is the broker's responsibility.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from trainer.core.parent_death import die_with_parent

GRACE_S = 5.0
"""Seconds after the first observed failure for other processes to report theirs, because the first observed failure may
not be the first failure.
"""
POLL_S = 0.05


def variables(local: int, *, processes_per_node: int, nodes: int, node: int, master: str) -> dict[str, str]:
    """Return the environment variables with the place of process `local` of a machine."""
    host, port = master.rsplit(":", 1)
    return {
        "RANK": str(node * processes_per_node + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(nodes * processes_per_node),
        "LOCAL_WORLD_SIZE": str(processes_per_node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def interface(master: str) -> dict[str, str]:
    """Return the variable with the network interface that reaches the first machine, for gloo.

    By default gloo takes the address of this machine's name, which on Debian is 127.0.1.1. The socket only looks up the
    route and sends nothing.
    """
    host, port = master.rsplit(":", 1)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.address == own for a in addresses):
                return {"GLOO_SOCKET_IFNAME": name}
    return {}


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; after a failure, kill those that still run after GRACE_S.

    Return 0 if all succeed, otherwise the lowest exit code of a failed process. The code of a process that a signal
    killed is negative, so it counts first: such a process did not fail because of the others.
    """
    deadline = float("inf")
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if deadline == float("inf") and any(p.returncode for p in processes):
            deadline = time.monotonic() + GRACE_S
        time.sleep(POLL_S)
    code = min((p.returncode for p in processes if p.poll()), default=0)
    for process in processes:
        process.kill()
        process.wait()
    return int(code)


def main(processes_per_node: int, nodes: int, node: int, master: str, run: str) -> int:
    """Run the workers to their end. Return the exit code: 128 plus the signal if a signal ended a worker."""
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes_per_node)), **interface(master)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.training.worker", run],
            env={
                **defaults,
                **os.environ,
                **variables(local, processes_per_node=processes_per_node, nodes=nodes, node=node, master=master),
            },
        )
        for local in range(processes_per_node)
    ]
    code = wait(processes)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    die_with_parent(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The agent alone decides when to save and stop.
    count, machines, place, *rest = sys.argv[1:]
    sys.exit(main(int(count), int(machines), int(place), *rest))
