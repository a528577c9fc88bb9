"""Training state to and from a folder of safetensors and JSON, off the training loop's critical path.

Weights and moments change only in the optimizer's update, so a thread copies them to host memory while the next
forward and backward run; the loop waits only if the copy is not over by the next update. Writing follows in the same
thread, into a folder that is renamed into place when whole. Processes that hold parts of the state write side by side;
one of each machine waits for the others of that machine.
"""

import contextlib
import errno
import math
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.contract.checkpoint_format import (
    GROUPS,
    METRICS,
    PLAN,
    STATE,
    CheckpointPlan,
    Piece,
    Progress,
    TensorLayout,
    Window,
    file_name,
    overlap,
    read_plan,
)
from trainer.core.ipc import RunFolder, SnapshotInfo, SnapshotPart, info_of

Tensors = dict[str, torch.Tensor]
PEERS_S = 1800.0
"""How long one process waits for the files of the others of its machine."""
LOOK_S = 0.01
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Local:
    """What this process holds of a tensor, which may still be the living one."""

    tensor: torch.Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]

    mine: bool = True
    """Whether this process is the one to write it: others may hold the same."""


Held = Mapping[str, Mapping[str, Local]]
"""By group and name."""


@dataclass(frozen=True, kw_only=True)
class SnapshotWriter:
    """Which of the writing processes this is."""

    number: int = 0
    of: int = 1
    beside: tuple[int, ...] = (0,)
    """Numbers of the writers on this machine; the first of them makes the snapshot whole."""
    part: SnapshotPart | None = None
    """None where they are all on one machine."""

    @property
    def first(self) -> bool:
        """Of this machine."""
        return self.number == self.beside[0]

    def own(self, held: "Held") -> "Held":
        """What this one writes."""
        return {g: {n: t for n, t in tensors.items() if t.mine} for g, tensors in held.items()}


@dataclass(frozen=True, kw_only=True)
class LocalSnapshot:
    """What one writer puts into a snapshot."""

    progress: Progress
    held: Held
    plan: CheckpointPlan | None
    """Of the first writer of all only."""
    metrics: Path
    journalled: bool = True
    """Whether `metrics` has all rows: the disk may be too full for one."""
    artifacts: Path | None = None
    """A folder to be part of it, which makes it the complete one. It stays, for another try where a process fails."""
    complete: bool = False
    still: bool = False
    """Nothing changes before it is written, so it is written from the living tensors: a copy would raise the peak."""


def parts(held: Held, writer: SnapshotWriter) -> dict[str, dict[str, TensorLayout]]:
    """This writer's part of the plan."""
    found: dict[str, dict[str, TensorLayout]] = {}
    for group, tensors in writer.own(held).items():
        file = file_name(group, writer.number, writer.of)
        found[group] = {
            name: TensorLayout(
                shape=local.whole,
                dtype=TYPES[local.tensor.dtype],
                pieces=(Piece(file=file, start=local.start, shape=tuple(local.tensor.shape)),)
                if local.tensor.numel()
                else (),
            )
            for name, local in tensors.items()
        }
    return found


def joined(all_parts: list[dict[str, dict[str, TensorLayout]]]) -> CheckpointPlan:
    """The plan of all writers."""
    tensors: dict[str, dict[str, TensorLayout]] = {group: {} for group in GROUPS}
    for one in all_parts:
        for group, wholes in one.items():
            for name, whole in wholes.items():
                before = tensors[group][name].pieces if name in tensors[group] else ()
                tensors[group][name] = whole.model_copy(update={"pieces": (*before, *whole.pieces)})
    return CheckpointPlan(tensors=tensors)


class StoredSnapshot:
    """The tensors of a verified checkpoint folder, of which any window can be read."""

    def __init__(self, folder: Path) -> None:
        """Raises BadFormat, OSError."""
        self.folder = folder
        self.plan = read_plan(folder)
        self.progress = Progress.model_validate_json((folder / STATE).read_bytes())
        self._open: dict[str, Any] = {}

    def names(self, group: str) -> list[str]:
        return list(self.plan.tensors[group])

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        return self.plan.tensors[group][name].shape

    def read(self, group: str, name: str, window: Window | None = None) -> torch.Tensor:
        """A window of a tensor, all of it by default. Raises KeyError, ValueError when that is not there."""
        whole = self.plan.tensors[group][name]
        wanted = window or ((0,) * len(whole.shape), whole.shape)
        if math.prod(wanted[1]) and overlap(((0,) * len(whole.shape), whole.shape), wanted) != wanted:
            raise ValueError(f"{name} has the shape {whole.shape}")
        found = torch.empty(wanted[1], dtype=_TYPE_OF[whole.dtype])
        for piece in whole.pieces:
            if common := overlap((piece.start, piece.shape), wanted):
                inner = self._file(piece.file).get_slice(name)[_slices(common, piece.start)]
                found[_slices(common, wanted[0])] = inner if common[0] else self._file(piece.file).get_tensor(name)
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]


_TYPE_OF = {name: kind for kind, name in TYPES.items()}


def _slices(window: Window, base: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at - b, at - b + size) for at, size, b in zip(*window, base, strict=True))


class Snapshots:
    """Takes snapshots one at a time; `stall_s` of the newest is how long the loop stood still for it."""

    def __init__(self, run: RunFolder, writer: SnapshotWriter | None) -> None:
        """`writer`: None for a process that writes nothing."""
        self._run = run
        self.writer = writer
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._failure = ""
        self._count = 0
        self.stall_s = 0.0

    @property
    def busy(self) -> bool:
        """True while one is being copied or written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: LocalSnapshot) -> None:
        """Starts to take it, where there is a writer. Its tensors may not change before `before_update` returns."""
        started = time.monotonic()
        self.join()
        self._copied.clear()
        self.stall_s = 0.0
        self._count += 1
        size = snapshot.metrics.stat().st_size if snapshot.metrics.exists() else 0
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._take, args=(snapshot, size, started, stream), name="snapshot")
        self._thread.start()
        self.stall_s += time.monotonic() - started

    def before_update(self) -> None:
        """Waits until the copy is over; called before anything that a snapshot copies may change."""
        if self._thread is not None and not self._copied.is_set():
            started = time.monotonic()
            self._copied.wait()
            self.stall_s += time.monotonic() - started

    def join(self) -> None:
        """Waits until the snapshot is on disk, or has failed. Raises what else went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises what went wrong with the last snapshot, if it is over."""
        if self._error is not None and not self.busy:
            error, self._error = self._error, None
            raise error

    def _take(self, snapshot: LocalSnapshot, size: int, started: float, stream: Any) -> None:
        try:
            try:
                copied = {} if snapshot.still else snapshot.held
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    copies = {group: _to_host(tensors) for group, tensors in copied.items()}
            finally:
                self._copied.set()
            assert self.writer is not None
            self._write(copies, snapshot, self.writer, size, started)
        except (OSError, SafetensorError) as e:
            self._failure = f"{type(e).__name__}: {e}"
        except BaseException as e:
            self._error = e

    def failure(self) -> str:
        """Why the last snapshot, which is over, could not be written: told once. Empty: it was, or is being."""
        if self.busy:
            return ""
        found, self._failure = self._failure, ""
        return found

    def _write(
        self, copies: dict[str, Tensors], snapshot: LocalSnapshot, writer: SnapshotWriter, size: int, started: float
    ) -> None:
        name = f"{snapshot.progress.step:010d}-{self._count:06d}"
        folder, whole = self._run.snapshots / f".{name}", self._run.snapshots / name
        try:
            self._fill(folder, copies, snapshot, writer, size)
        except (OSError, SafetensorError):
            if writer.first:
                with contextlib.suppress(OSError):
                    self._await(name, writer.beside[1:])
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._mark(name, writer.number, failed=True).touch()
            raise
        if not writer.first:
            self._mark(name, writer.number).touch()
            return
        try:
            self._await(name, writer.beside[1:])
            self._seal(whole, snapshot, writer, started)
            folder.rename(whole)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            info_of(whole).unlink(missing_ok=True)
            raise

    def _fill(
        self, folder: Path, copies: dict[str, Tensors], snapshot: LocalSnapshot, writer: SnapshotWriter, size: int
    ) -> None:
        if not snapshot.journalled:
            raise OSError(errno.ENOSPC, "the rows of the last steps could not be written")
        folder.mkdir(exist_ok=True)
        for group, held in snapshot.held.items():
            tensors = _to_host(held, copy=False) if snapshot.still else copies[group]
            if tensors or writer.number == 0:
                save_file(tensors, folder / file_name(group, writer.number, writer.of))
        if snapshot.plan is not None:
            (folder / PLAN).write_text(snapshot.plan.model_dump_json())
            (folder / STATE).write_text(snapshot.progress.model_dump_json())
            with snapshot.metrics.open("rb") as source, (folder / METRICS).open("wb") as target:
                target.write(source.read(size))
        if snapshot.artifacts is not None:
            shutil.copytree(snapshot.artifacts, folder, dirs_exist_ok=True)

    def _seal(self, whole: Path, snapshot: LocalSnapshot, writer: SnapshotWriter, started: float) -> None:
        info = SnapshotInfo(
            step=snapshot.progress.step,
            complete=snapshot.complete,
            taken_s=round(time.monotonic() - started, 3),
            stall_s=self.stall_s,
            part=writer.part and writer.part.model_copy(update={"nonce": f"{writer.part.nonce}{self._count:04x}"}),
        )
        info_of(whole).write_text(info.model_dump_json())

    def _mark(self, name: str, number: int, *, failed: bool = False) -> Path:
        """The file by which a writer says that its part lies in the folder, or that it does not."""
        return self._run.snapshots / f".{name}.{number}{'.failed' if failed else ''}"

    def _await(self, name: str, peers: tuple[int, ...]) -> None:
        deadline = time.monotonic() + PEERS_S
        for number in peers:
            mark, failed = self._mark(name, number), self._mark(name, number, failed=True)
            while not mark.exists():
                if failed.exists():
                    failed.unlink()
                    raise OSError(errno.EIO, f"process {number} could not write its part of the checkpoint")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {number} did not write its part of the checkpoint")
                time.sleep(LOOK_S)
            mark.unlink()


def _to_host(tensors: Mapping[str, Local], *, copy: bool = True) -> Tensors:
    """`copy`: also of what lies there; without, only of what shares its memory, which safetensors does not write."""
    found: Tensors = {}
    taken: set[int] = set()
    for name, local in tensors.items():
        tensor = local.tensor.detach()
        if tensor.numel():
            memory = tensor.untyped_storage().data_ptr()
            found[name] = tensor.to("cpu", copy=copy or memory in taken).contiguous()
            taken.add(memory)
    return found
