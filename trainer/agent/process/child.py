"""The worker, or the user's own program, as a child process; and what its end means."""

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
from trainer.contract.documents import ExitCode, Outcome, World
from trainer.core import parent_death as tether
from trainer.core.ipc import RunFolder

MEETING_PORTS = range(20_000, 32_768)

OUTCOMES = {
    ExitCode.COMPLETED: Outcome.COMPLETED,
    ExitCode.DRAINED: Outcome.DRAINED,
    ExitCode.USER_ERROR: Outcome.USER_ERROR,
    ExitCode.DATA: Outcome.DATA,
    ExitCode.OOM: Outcome.OOM,
    ExitCode.INFRASTRUCTURE: Outcome.INFRASTRUCTURE,
}


def worker_argv(world: World, env: Environment, run: RunFolder) -> list[str]:
    """A launcher for several processes; a single one needs none."""
    each = max(1, world.gpus_per_node)
    if world.nodes * each == 1:
        return [sys.executable, "-m", "trainer.training.worker", str(run.root)]
    master = env.master if world.nodes > 1 else f"127.0.0.1:{free_port()}"
    place = [str(each), str(world.nodes), str(env.node), master]
    return [sys.executable, "-m", "trainer.parallel.launch", *place, str(run.root)]


def free_port() -> int:
    """For the processes of this machine to meet at; another job of it may have any fixed one.

    Below the ports that systems hand to outgoing connections (from 32,768 on Linux): one of those may be given away
    before the first process, which has to import torch, listens there.
    """
    for port in random.SystemRandom().sample(MEETING_PORTS, len(MEETING_PORTS)):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no port of 127.0.0.1 is free from {MEETING_PORTS[0]} to {MEETING_PORTS[-1]}")


def child_environment(base: Mapping[str, str], extra: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The child's variables: the agent's without its keys, the job's `env`, the job's secrets."""
    env = {k: v for k, v in base.items() if k not in OWN and k != "PYTHONDONTWRITEBYTECODE"}
    return {**env, "PYTHONUNBUFFERED": "1", **extra, **secrets}


def worker_defaults(env: dict[str, str]) -> dict[str, str]:
    """Keeps libraries from probing for what is not used, telling others, and painting progress bars into the log.

    OMP_WAIT_POLICY: threads that spin at a barrier made a step ten times slower where other processes had work too.
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
        "FLASH_ATTENTION_DETERMINISTIC": "1",  # of the package flash-attn, which torch's own mode does not reach
    }
    return {**quiet, **env}


def oom_kills() -> int:
    """How often the kernel killed for memory in this control group; 0 where that is not told."""
    with contextlib.suppress(OSError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Child:
    """One process, tied to the agent's life and in its process group."""

    def __init__(self, process: asyncio.subprocess.Process, output: int, oom_before: int) -> None:
        self._process = process
        self._output = output
        self._oom_before = oom_before
        self.asked = False
        """True once it is to end before its work is done: it was still running when that was known."""
        self.stopped = False
        """True once the agent itself has killed it."""

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> "Child":
        """Starts `argv`, never through a shell.

        The pipe is our own: asyncio's PIPE delays `wait` until every heir of the child has closed it too.
        """
        tied = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *argv]
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
        """Reads the output until it ends."""
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
        """Asks a script to end; a child that is gone is fine."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self, spared: Collection[int] = ()) -> None:
        """Ends the child and everything below the agent but `spared`."""
        self.stopped = True
        kill_descendants(spared)

    @property
    def killed_for_memory(self) -> bool:
        """True when the kernel has killed in this control group for memory since the start: the child, or one of its
        own, whose death a shell reports as 137 and a launcher as 1. Without such a mark a SIGKILL is no lack of
        memory.
        """
        return oom_kills() > self._oom_before

    def outcome(self, code: int, *, script: bool) -> Outcome:
        """What an exit code means; a script that ends by itself after it was asked to has obeyed.

        Whatever it ends with, unless that names a failure: torchrun ends with 1 when it is asked to end.
        """
        if code not in OUTCOMES and self.killed_for_memory:
            return Outcome.OOM
        if script and self.asked and (code == 0 or code not in OUTCOMES):
            return Outcome.DRAINED
        other = Outcome.USER_ERROR if script else Outcome.INFRASTRUCTURE
        return OUTCOMES.get(code, other)  # type: ignore[call-overload, no-any-return]


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Of a process, by default this one, children of dead children included; none of one that has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_descendants(spared: Collection[int] = ()) -> None:
    """SIGKILLs every process below this one."""
    for process in descendants():
        if process.pid not in spared:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
