"""Worker or user program as a child process."""

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from trainer.agent.base.environment import OWN, Environment
from trainer.contract.documents import World
from trainer.core import parent_death
from trainer.core.ipc import RunFolder

MEETING_PORTS = range(20_000, 32_768)


def worker_argv(world: World, env: Environment, run: RunFolder) -> list[str]:
    """Return the worker's command line; for several processes it starts a launcher."""
    processes_per_node = max(1, world.gpus_per_node)
    if world.nodes * processes_per_node == 1:
        return [sys.executable, "-m", "trainer.training.worker", str(run.root)]
    master = env.master if world.nodes > 1 else f"127.0.0.1:{free_port()}"
    place = [str(processes_per_node), str(world.nodes), str(env.node), master]
    return [sys.executable, "-m", "trainer.parallel.launch", *place, str(run.root)]


def free_port() -> int:
    """Return a free port for this machine's processes to meet at; another job may use any fixed port.

    It lies below the ports that systems assign to outgoing connections (from 32,768 on Linux). Such a port could be
    assigned before the first process, which must import torch, listens on it.
    """
    for port in random.SystemRandom().sample(MEETING_PORTS, len(MEETING_PORTS)):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no port of 127.0.0.1 is free from {MEETING_PORTS[0]} to {MEETING_PORTS[-1]}")


def child_environment(base: Mapping[str, str], extra: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the child's variables: the agent's without its keys, the job's `env`, the job's secrets."""
    env = {k: v for k, v in base.items() if k not in OWN and k != "PYTHONDONTWRITEBYTECODE"}
    return {**env, "PYTHONUNBUFFERED": "1", **extra, **secrets}


def worker_defaults(env: dict[str, str]) -> dict[str, str]:
    """Set variables against probing, telemetry and progress bars in the log.

    OMP_WAIT_POLICY: threads that spin at a barrier made a step ten times slower while other processes were busy.
    """
    quiet = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "USE_TF": "0",
        "USE_FLAX": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "FLASH_ATTENTION_DETERMINISTIC": "1",  # for flash-attn, which torch's mode does not cover
    }
    return {**quiet, **env}


def oom_kills() -> int:
    """Return the number of kernel out-of-memory kills in this control group, or 0 if it is not available."""
    with contextlib.suppress(OSError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Child:
    """Child process in the agent's process group, which dies with the agent."""

    def __init__(self, process: asyncio.subprocess.Process, output: int, oom_before: int) -> None:
        self._process = process
        self._output = output
        self._oom_before = oom_before
        self.asked = False
        """True once the child must end early; only set while the child still runs."""
        self.stopped = False
        """True once the agent itself has killed the child."""

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> "Child":
        """Start `argv`, never through a shell.

        The pipe is created here, because with asyncio's PIPE `wait` returns only after all descendants have closed the
        inherited pipe.
        """
        tied = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *argv]
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *tied,
                env=dict(env),
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
            )
        finally:
            os.close(writing)
        return cls(process, reading, oom_kills())

    async def pump(self, feed: Callable[[bytes], None]) -> None:
        """Read the output until it ends."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._output, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while data := await reader.read(1 << 16):
                feed(data)
        finally:
            transport.close()

    async def wait(self) -> int:
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask a script to end; a child that has exited is ignored."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self, spared: Collection[int] = ()) -> None:
        """Kill the child and every process below the agent except `spared`."""
        self.stopped = True
        kill_descendants(spared)

    @property
    def killed_for_memory(self) -> bool:
        """True if the kernel killed a process of this control group for memory since the start.

        The process may be the child or a descendant, whose death a shell reports as 137 and a launcher as 1.
        Without such a record a SIGKILL does not mean a lack of memory.
        """
        return oom_kills() > self._oom_before


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the descendants of a process (default: this one), including children of dead children.

    The list is empty if the process has exited.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_descendants(spared: Collection[int] = ()) -> None:
    """Send SIGKILL to every process below this one."""
    for process in descendants():
        if process.pid not in spared:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
