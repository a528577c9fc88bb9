"""Training state to and from a folder of safetensors and JSON, off the training loop's critical path.

Weights and moments change only in the optimizer's update, so a thread copies them to host memory while the next
forward and backward run; the loop waits only if the copy is not over by the next update. Writing follows in the same
thread, into a folder that is renamed into place when whole.
"""

import json
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from trainer.contract.base import Document
from trainer.ipc import INFO, RunFolder, SnapshotInfo

Tensors = dict[str, torch.Tensor]


class Progress(Document):
    """`state.json`: where the training stands, without tensors."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """The data cursor."""
    micro: int = 0
    """Micro-batches of the next step whose gradients are already accumulated (in gradients.safetensors)."""
    micro_rows: int = 0
    """Rows of each of these; a plan with others begins the step again."""
    micro_loss: float = 0.0
    """Their summed loss."""
    world: int = 1
    rng: tuple[dict[str, Any], ...] = ()
    """Python's and NumPy's generators, for each process."""
    scaler: dict[str, Any] | None = None
    heldout_loss_before: float | None = None
    metrics_before: dict[str, float] = Field(default_factory=dict)
    """The task's own, measured with the loss before the first step."""
    heldout: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss) measured so far."""
    base_samples: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """A whole training state; the tensors may still be the living ones."""

    progress: Progress
    model: Tensors
    optimizer: Tensors
    rng: Tensors
    gradients: Tensors = field(default_factory=dict)

    def groups(self) -> dict[str, Tensors]:
        """The tensors by file name."""
        return {n: getattr(self, n) for n in ("model", "optimizer", "rng", "gradients")}


def random_state() -> dict[str, Any]:
    """This process's generators as JSON types and tensors."""
    version, key, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(key), gauss],
        "numpy": [kind, [int(k) for k in np.asarray(keys)], *rest],
        "torch": torch.get_rng_state(),
        "cuda": devices[torch.cuda.current_device()] if devices else None,
    }


def set_random_state(plain: dict[str, Any], tensors: Tensors, rank: int) -> None:
    """Puts the generators of process `rank` back."""
    version, key, gauss = plain["python"]
    random.setstate((version, tuple(key), gauss))
    kind, keys, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors[f"{rank}.torch"])
    if f"{rank}.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[f"{rank}.cuda"])


def split_random(states: list[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], Tensors]:
    """The generators of all processes as (JSON part, tensors)."""
    tensors = {f"{r}.{n}": s[n] for r, s in enumerate(states) for n in ("torch", "cuda") if s[n] is not None}
    return tuple({n: s[n] for n in ("python", "numpy")} for s in states), tensors


def optimizer_tensors(optimizer: Any, names: dict[str, torch.nn.Parameter]) -> Tensors:
    """The moments and step counts as `<parameter>/<kind>`."""
    return {f"{name}/{kind}": value for name, p in names.items() for kind, value in optimizer.state.get(p, {}).items()}


def load_optimizer(optimizer: Any, names: dict[str, torch.nn.Parameter], tensors: Tensors) -> None:
    """The opposite of `optimizer_tensors`; torch itself moves each tensor to where it belongs."""
    by_id = {id(p): name for name, p in names.items()}
    order = [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    number = {name: i for i, name in enumerate(order)}
    for key, value in tensors.items():
        name, kind = key.rsplit("/", 1)
        state.setdefault(number[name], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load(folder: Path) -> State:
    """The state in a verified checkpoint folder."""
    progress = Progress.model_validate_json((folder / "state.json").read_bytes())
    return State(progress=progress, **{n: load_file(folder / f"{n}.safetensors") for n in FILES})


FILES = ("model", "optimizer", "rng", "gradients")


class Snapshots:
    """Takes snapshots one at a time; `stall_s` of the newest is how long the loop stood still for it."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._count = 0
        self.stall_s = 0.0

    @property
    def busy(self) -> bool:
        """True while one is being copied or written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: State, metrics: Path, *, artifacts: Path | None = None) -> None:
        """Starts a snapshot. The model, optimizer and gradient tensors may not change before `before_update` returns.

        `artifacts`: a folder to be part of it, which makes it the complete one.
        """
        started = time.monotonic()
        self.join()
        self._copied.clear()
        self.stall_s = 0.0
        self._count += 1
        size = metrics.stat().st_size if metrics.exists() else 0
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        arguments = (state, metrics, size, artifacts, started, stream)
        self._thread = threading.Thread(target=self._take, args=arguments, name="snapshot")
        self._thread.start()
        self.stall_s += time.monotonic() - started

    def before_update(self) -> None:
        """Waits until the copy is over; called before anything that a snapshot copies may change."""
        if self._thread is not None and not self._copied.is_set():
            started = time.monotonic()
            self._copied.wait()
            self.stall_s += time.monotonic() - started

    def join(self) -> None:
        """Waits until the snapshot is on disk. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _take(
        self, state: State, metrics: Path, size: int, artifacts: Path | None, started: float, stream: Any
    ) -> None:
        try:
            try:
                with torch.cuda.stream(stream) if stream is not None else _nothing():
                    copies = {n: _to_host(tensors) for n, tensors in state.groups().items()}
            finally:
                self._copied.set()
            self._write(copies, state.progress, metrics, size, artifacts, started)
        except BaseException as e:
            self._error = e

    def _write(
        self,
        copies: dict[str, Tensors],
        progress: Progress,
        metrics: Path,
        size: int,
        artifacts: Path | None,
        started: float,
    ) -> None:
        name = f"{progress.step:010d}-{self._count:06d}"
        temporary = self._run.snapshots / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for group, tensors in copies.items():
            save_file(tensors, temporary / f"{group}.safetensors")
        (temporary / "state.json").write_text(progress.model_dump_json())
        with metrics.open("rb") as source, (temporary / "metrics.jsonl").open("wb") as target:
            target.write(source.read(size))
        if artifacts is not None:
            shutil.copytree(artifacts, temporary, dirs_exist_ok=True)
            shutil.rmtree(artifacts)
        info = SnapshotInfo(step=progress.step, complete=artifacts is not None, started=started, stall_s=self.stall_s)
        (temporary / INFO).write_text(json.dumps(info.model_dump()))
        temporary.rename(self._run.snapshots / name)


def _to_host(tensors: Tensors) -> Tensors:
    return {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()
