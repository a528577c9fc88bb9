"""Machines (agent and worker) that start without imports, over a folder as blob store.

The real agent and the real worker are two processes, forked from one that has the libraries loaded. They are killed or
drained at a named step or at any time. They differ from production in two points: a fork replaces an exec, and the time
between saves is as short as possible. A run of a second would otherwise hardly save.
"""

import asyncio
import functools
import hashlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from tests.crash.gate import Gate, Point
from tests.trainer.support.harness import INSTALLATION, Agent, Bench, until
from tests.trainer.support.workers import FORKS
from trainer.agent import agent as run
from trainer.agent import train_runner
from trainer.agent.base.environment import Environment
from trainer.agent.process.child import Child, oom_kills
from trainer.agent.upload import checkpoint_uploader as saver
from trainer.contract.checkpoint_format import GROUPS
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.core.parent_death import die_with_parent

How = Literal["machine", "worker", "drain"]
"""The machine dies; the worker dies, and its agent saves what is complete; the machine receives a drain order."""
POLL_S = 0.002
EVALUATING, LOG = "evaluating", "log"


def micro(step: int, number: int) -> Point:
    """Return the point before a micro-batch's forward pass; steps and numbers count from 0."""
    return Point(name=f"micro {step}.{number}", number=1, moment="before")


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order for one life of a machine."""

    blobs: str
    attempt: str
    workdir: Path
    key: str
    at: Point | None = None
    how: How = "machine"


class WarmBench(Bench):
    """A bench whose agents are forked."""

    at: Point | None = None
    how: How = "machine"
    """Point (`at`) and manner (`how`) of the next agent's end; it is not interrupted without a point."""

    def _spawn(self, attempt: str) -> Agent:
        workdir = self.folder / "work" / attempt
        workdir.mkdir(parents=True)
        order = Order(
            blobs=self.root.as_uri(), attempt=attempt, workdir=workdir, key=self.key, at=self.at, how=self.how
        )
        agent = Agent(self, attempt, Forked(order))
        self._agents.append(agent)
        return agent


class Forked:
    """A life's process, as `harness.Agent` handles it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._process = FORKS.Process(target=live, args=(order,))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        until((order.workdir / LOG).exists, "a life's begin, with a process group of its own")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self._order} goes on after {timeout} s")
        return self._process.exitcode


# ---------------------------------------------------------------------------------------------------------- in the fork


def live(order: Order) -> None:
    """Run for ever."""
    from tests.crash.trainee import AGENT_STEPS, WORKER_STEPS, Told, stand_at

    os.setsid()
    log = os.open(order.workdir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    reading, writing = os.pipe()
    folder, agent, worker = RunFolder(root=order.workdir / "run"), os.getpid(), os.fork()
    gate = Gate(kill_at=order.at, end=lambda: _end(order.how, agent, worker, folder))
    code = 70
    try:
        if worker:
            os.close(writing)
            stand_at(gate, AGENT_STEPS, "agent")
            code = _attend(order, worker, reading)
        else:
            die_with_parent(agent)
            os.close(reading)
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            told = Told(order.workdir)
            stand_at(gate, WORKER_STEPS, "worker")
            code = _work(folder, gate, told)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _end(how: How, agent: int, worker: int, folder: RunFolder) -> None:
    if how == "machine":
        os.killpg(0, signal.SIGKILL)
    elif how == "worker":
        os.kill(worker or os.getpid(), signal.SIGKILL)
    else:
        os.kill(agent, signal.SIGTERM)
        if not worker:
            until(folder.drain.exists, "the agent's request to save and stop")


def _attend(order: Order, worker: int, output: int) -> int:
    saver.POLL_S = POLL_S
    ForkedChild.waits = (worker, output)
    for name, instead in (("Child", ForkedChild), ("WorkerJob", _often)):
        setattr(train_runner, name, instead)
    env = Environment(
        blobs=order.blobs, installation=INSTALLATION, attempt=order.attempt, workdir=order.workdir, key=order.key
    )
    return run.main(env)


def _often(**fields: Any) -> WorkerJob:
    return WorkerJob(**fields | {"save_every_s": 0})


class ForkedChild(Child):
    """The worker that was forked before the agent had threads, and waits for its job."""

    waits: ClassVar[tuple[int, int]]

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> "ForkedChild":
        number, output = cls.waits
        return cls(cast(asyncio.subprocess.Process, _Process(number)), output, oom_kills())


class _Process:
    def __init__(self, number: int) -> None:
        self._number = number

    async def wait(self) -> int:
        _, status = await asyncio.to_thread(os.waitpid, self._number, 0)
        return os.waitstatus_to_exitcode(status)


def _work(folder: RunFolder, gate: Gate, told: Callable[..., None]) -> int:
    import torch

    from trainer.training.worker import main

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _stand_in_the_loop(gate)
    _tell_states(gate, told)
    while not folder.job.exists():
        time.sleep(POLL_S)
    return int(main(folder.root))


def _stand_in_the_loop(gate: Gate) -> None:
    """Let micro-batches and evaluation batches pass the gate."""
    from trainer.batching import sampler as order
    from trainer.training import evaluation as evaluate

    noise, heldout = order.micro_batch_seed, evaluate.heldout

    @functools.wraps(noise)
    def numbered(seed: int, step: int, number: int) -> int:
        gate.passes(f"micro {step}.{number}", 1, "before")
        return noise(seed, step, number)

    @functools.wraps(heldout)
    def counted(*arguments: Any, between: Callable[[], None], **more: Any) -> Any:
        def passing() -> None:
            gate.passes(EVALUATING, gate.number(EVALUATING), "before")
            between()

        return heldout(*arguments, between=passing, **more)

    order.micro_batch_seed, evaluate.heldout = numbered, counted


def _tell_states(gate: Gate, told: Callable[..., None]) -> None:
    """Report a hash of every state before it is saved, and of every loaded state."""
    from trainer.checkpoint import snapshot
    from trainer.training import checkpointing as keeper

    to_host, stored = snapshot._to_host, snapshot.StoredSnapshot
    groups: list[str] = []

    def copied(tensors: Any, **how: Any) -> Any:
        copies = to_host(tensors, **how)
        groups.append(_digest(copies))
        if len(groups) == len(GROUPS):
            told(saved="".join(groups))
            groups.clear()
        return copies

    def loaded(path: Path) -> Any:
        name = "worker:load restore"
        number = gate.number(name)
        gate.passes(name, number, "before")
        found = stored(path)
        whole = [_digest({n: found.read(g, n) for n in found.names(g)}) for g in GROUPS]
        told(loaded="".join(whole), step=found.progress.step)
        gate.passes(name, number, "after")
        return found

    for owner, name, instead in ((snapshot, "_to_host", copied), (keeper, "StoredSnapshot", loaded)):
        setattr(owner, name, instead)


def _digest(tensors: Mapping[str, Any]) -> str:
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:16]
