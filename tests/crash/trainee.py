"""Machine that saves with the trainer's own agent (restore, commit, prune) and worker (snapshots).

Both are real processes, forked from a process that has imported torch. They are killed at a named step, or by the
process that started them. Only the training is not real: weights and moments are a function of the step, so that a
restore can be checked bit for bit. The machine writes its reports to a file, which outlives it.
"""

import asyncio
import contextlib
import fcntl
import functools
import inspect
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from tests.crash.forks import keep
from tests.crash.gate import Gate, Point
from trainer.agent.base import prepare
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload import checkpoint_uploader as saver
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint import snapshot
from trainer.checkpoint.protocol import Origin
from trainer.checkpoint.snapshot import LocalSnapshot, Snapshots, SnapshotWriter, StoredSnapshot, Tensors
from trainer.contract.checkpoint_format import Progress
from trainer.contract.documents import AttemptSpec
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import RunFolder, replace
from trainer.core.parent_death import die_with_parent
from trainer.objectstore.objects import Objects
from trainer.parallel import ddp as parallel

TOLD, LOCK, GO = "told.jsonl", "worker.lock", "go"
KEEP = 2
POLL_S = 0.002
SMALL, LARGE = 1_000, 1_500_000
"""Numbers in a tensor; the large one is above obstore's size of a part."""

# -------------------------------------------------------------------------------------------------------------- orders


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order for one life of a machine."""

    folder: str
    """Path of the machine's disk."""
    blobs: str
    options: dict[str, str]
    installation: str
    job: str
    attempt: str
    resume_from: tuple[str, ...]
    saves: int
    """Number of checkpoints until the machine is done."""
    hurry: bool = False
    """True: the next save begins at once, and may overtake the last one. False: it waits until the last one is
    committed.
    """
    large: bool = False
    """True: results are so large that they are uploaded in parts."""
    kill: tuple[str, int, str] | None = None
    """Name, number and moment of the step at which it dies."""
    worker_only: bool = False
    """True: only the worker dies at `kill`, and its agent uploads the complete snapshots."""


class Told:
    """Log of JSON lines, which other processes read even after this process has died."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / TOLD, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, **what: Any) -> None:
        os.write(self._file, json.dumps(what).encode() + b"\n")


# --------------------------------------------------------------------------------------------------------------- steps


_OWN_NUMBER = re.compile(r"\.\d+$")


def named(path: Any) -> str:
    """Return a file's name, or the kind of a hidden file or numbered folder."""
    name = _OWN_NUMBER.sub("", Path(path).name).lstrip(".")
    return "snapshot" if name.split("-")[0].isdigit() else name


NAMELESS = 9
AGENT_STEPS: tuple[tuple[Any, str, str, int], ...] = (
    (Objects, "keys", "list", NAMELESS),
    (Objects, "download", "download", 1),
    (checkpoint, "sha256_of", "hash", 0),
    (Objects, "upload", "upload", 1),
    (Objects, "create", "create", 1),
    (Objects, "delete", "delete", 1),
    (shutil, "rmtree", "remove", 0),
    (Path, "replace", "set aside", 0),
    (Path, "rename", "rename", 0),
    (Path, "unlink", "unlink", 0),
)
"""(owner, function, name of the step, index of the argument that names the object)"""
WORKER_STEPS: tuple[tuple[Any, str, str, int], ...] = (
    (snapshot, "StoredSnapshot", "load", 0),
    (snapshot, "_to_host", "copy", NAMELESS),
    (snapshot, "save_file", "write", 1),
    (Path, "write_text", "write", 0),
    (Path, "rename", "rename", 0),
    (shutil, "copytree", "take", 0),
)


def stand_at(gate: Gate, steps: tuple[tuple[Any, str, str, int], ...], role: str) -> None:
    """Route every later call of these functions through the gate."""
    for owner, name, what, which in steps:
        setattr(owner, name, _passing(gate, getattr(owner, name), f"{role}:{what}", which))


def _passing(gate: Gate, function: Callable[..., Any], what: str, which: int) -> Callable[..., Any]:
    def label(arguments: tuple[Any, ...]) -> str:
        return f"{what} {named(arguments[which])}" if which < len(arguments) else what

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        name = label(arguments)
        number = gate.number(name)
        gate.passes(name, number, "before")
        result = function(*arguments, **more)
        gate.passes(name, number, "after")
        return result

    @functools.wraps(function)
    async def later(*arguments: Any, **more: Any) -> Any:
        name = label(arguments)
        number = gate.number(name)
        gate.passes(name, number, "before")
        result = await function(*arguments, **more)
        gate.passes(name, number, "after")
        return result

    return later if inspect.iscoroutinefunction(function) else call


# -------------------------------------------------------------------------------------------------------------- worker


def tensors_of(step: int) -> dict[str, Tensors]:
    """Return the weights, moments and gradients after `step` steps."""
    draw = torch.Generator().manual_seed(step)

    def drawn(count: int) -> torch.Tensor:
        return torch.rand(count, generator=draw)

    moments = {"a/exp_avg": drawn(SMALL), "a/step": torch.tensor(float(step))}
    return {"model": {"a": drawn(SMALL), "b": drawn(SMALL)}, "optimizer": moments, "gradients": {"a": drawn(16)}}


def exact(stored: StoredSnapshot, metrics: Path) -> bool:
    """Return True if the snapshot is bit for bit that of its step, with the metrics of all steps until then."""
    same = all(
        set(stored.names(group)) == set(tensors)
        and all(torch.equal(stored.read(group, n), t) for n, t in tensors.items())
        for group, tensors in tensors_of(stored.progress.step).items()
    )
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    return same and steps == list(range(1, stored.progress.step + 1))


def work(order: Order, run: RunFolder, told: Told) -> None:
    """Train and take snapshots, as `trainer.training.loop` does."""
    torch.set_num_threads(1)
    _wait(run.job.exists)
    restored = json.loads(run.job.read_text())["restore"]
    metrics, done = run.root / "metrics.jsonl", 0
    if restored is not None:
        stored = snapshot.StoredSnapshot(Path(restored))
        whole = exact(stored, Path(restored) / "metrics.jsonl")
        done = stored.progress.step
        told(restored=done, whole=whole)
        shutil.copyfile(Path(restored) / "metrics.jsonl", metrics)
    else:
        told(restored=0, whole=True)
    living = tensors_of(done)
    alone, writer = parallel.DataParallel(Accelerator(cpu=True)), SnapshotWriter()
    snapshots = Snapshots(run, writer)
    last = done + order.saves
    for step in range(done + 1, last + 1):
        snapshots.before_update()
        _update(living, tensors_of(step))
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        held = {group: alone.held(tensors) for group, tensors in living.items()}
        snapshots.begin(
            LocalSnapshot(
                progress=Progress(step=step, samples=step),
                held=held,
                plan=snapshot.joined([snapshot.writer_plan(held, writer)]),
                metrics=metrics,
                artifacts=_artifacts(order, run.root) if step == last else None,
                complete=step == last,
            )
        )
        if not order.hurry:
            snapshots.join()
            _wait(lambda: not any(run.snapshots.iterdir()))  # committed, and removed
    snapshots.join()


def _update(living: dict[str, Tensors], to: dict[str, Tensors]) -> None:
    """Update tensors in place, as an optimizer does."""
    for group, tensors in to.items():
        for name, tensor in tensors.items():
            living[group][name].copy_(tensor)


def _artifacts(order: Order, root: Path) -> Path:
    folder = root / "artifacts"
    (folder / "adapter").mkdir(parents=True)
    save_file({"a": torch.ones(LARGE if order.large else SMALL)}, folder / "adapter" / "adapter_model.safetensors")
    return folder


def _wait(fact: Callable[[], bool]) -> None:
    while not fact():
        time.sleep(POLL_S)


# --------------------------------------------------------------------------------------------------------------- agent


async def attend(order: Order, run: RunFolder, told: Told, worker: int) -> None:
    """Restore, and upload the worker's snapshots, including those left at its end: the agent's `_train`."""
    env = Environment(
        blobs=order.blobs, installation=order.installation, attempt=order.attempt, store_options=order.options,
        workdir=Path(order.folder),
    )  # fmt: skip
    objects = Objects.open(env.blobs, env.store_options, env.installation)
    state, origin = AgentState(env=env, run=run), Origin(job=order.job, attempt=order.attempt, kind="train")
    spec = AttemptSpec(
        installation=order.installation, job=order.job, attempt=order.attempt, number=1,
        resume_from=order.resume_from,
    )  # fmt: skip
    target = env.workdir / "restore"
    found = await prepare.restore(objects, spec, origin, target, lambda line: told(passed_over=line))
    replace(run.job, json.dumps({"restore": None if found is None else str(target)}))

    def committed(cost_s: float) -> None:
        assert state.checkpoint is not None
        told(committed=state.checkpoint.step)

    uploads = Saver(
        objects,
        state,
        origin,
        config=CheckpointConfig(keep=KEEP),
        guard=None,
        log=lambda line: told(said=line),
        committed=committed,
    )
    uploading = asyncio.ensure_future(uploads.run())
    ended = asyncio.ensure_future(asyncio.to_thread(os.waitpid, worker, 0))
    await asyncio.wait({uploading, ended}, return_when=asyncio.FIRST_COMPLETED)
    if uploading.done():
        uploading.result()
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)
    told(flushed=await uploads.flush())


# ---------------------------------------------------------------------------------------------------------------- both


def live(asked: dict[str, Any]) -> None:
    """Run one life to its end."""
    order = Order(**asked)
    folder = Path(order.folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.setpgid(0, 0)
    told, run = Told(folder), RunFolder(root=folder / "run")
    run.make()
    _wait((folder / GO).exists)  # until the killing process is ready
    agent, worker = os.getpid(), os.fork()
    role = "agent" if worker else "worker"
    kill = Point(name=order.kill[0], number=order.kill[1], moment=order.kill[2]) if order.kill else None  # type: ignore[arg-type]

    def end() -> None:
        if order.worker_only:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker or os.getpid(), signal.SIGKILL)
        else:
            os.killpg(0, signal.SIGKILL)

    gate = _Telling(end=end, kill_at=kill, told=told)
    stand_at(gate, AGENT_STEPS if worker else WORKER_STEPS, role)
    if worker:
        saver.POLL_S = POLL_S
        asyncio.run(attend(order, run, told, worker))
        told(ended=True)
        return
    die_with_parent(agent)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    work(order, run, told)


class _Telling(Gate):
    """Gate that reports each passage, and the point of its kill."""

    def __init__(self, *, told: Told, **what: Any) -> None:
        super().__init__(**what)
        self._told = told

    def number(self, name: str) -> int:
        number = super().number(name)
        self._told(passed=name, number=number)
        return number

    def passes(self, name: str, number: int, moment: Any) -> bool:
        if self.kill_at == Point(name=name, number=number, moment=moment):
            self._told(killed=str(self.kill_at))
        return super().passes(name, number, moment)


if __name__ == "__main__":
    keep(live)
