"""Saves and loads the training state as safetensors and JSON, outside the training loop's critical path.

Weights and moments change only in the optimizer's update, so a thread copies them to host memory during the next
forward and backward. The loop waits only if the copy is not finished by the next update. The same thread then writes to
a folder that is renamed when complete. Processes that hold parts of the state write concurrently. The first writer of
each machine waits for the other writers there, and then renames the folder.
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
"""Seconds that a process waits for the files of its machine's other processes."""
POLL_S = 0.01
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Local:
    """This process's part of a tensor, possibly the live tensor."""

    tensor: torch.Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]

    mine: bool = True
    """True if this process writes the part; other processes may hold the same part."""


Held = Mapping[str, Mapping[str, Local]]
"""Tensors by group, then name."""


@dataclass(frozen=True, kw_only=True)
class SnapshotWriter:
    """Position of this process among the writers."""

    number: int = 0
    of: int = 1
    machine_writers: tuple[int, ...] = (0,)
    """Numbers of the writers on this machine; the first of them completes the snapshot."""
    part: SnapshotPart | None = None
    """Part of a snapshot on several machines; None on one machine."""

    @property
    def first(self) -> bool:
        """True for the first writer of this machine."""
        return self.number == self.machine_writers[0]

    def owned(self, held: "Held") -> "Held":
        """Return the tensors that this process writes."""
        return {g: {n: t for n, t in tensors.items() if t.mine} for g, tensors in held.items()}


@dataclass(frozen=True, kw_only=True)
class LocalSnapshot:
    """Content that one writer adds to a snapshot."""

    progress: Progress
    held: Held
    plan: CheckpointPlan | None
    """Plan of the checkpoint; only the first writer of all has it."""
    metrics: Path
    journalled: bool = True
    """True if `metrics` has all rows; a full disk may have prevented one."""
    artifacts: Path | None = None
    """Folder of the results to include; None: no results. The folder is not removed, because a retry needs it if a
    process cannot write.
    """
    complete: bool = False
    tensors_frozen: bool = False
    """True if no tensor changes before the snapshot is written. The live tensors are then written, because a copy
    would raise the peak of host memory.
    """


def writer_plan(held: Held, writer: SnapshotWriter) -> dict[str, dict[str, TensorLayout]]:
    """Return this writer's part of the plan."""
    layouts: dict[str, dict[str, TensorLayout]] = {}
    for group, tensors in writer.owned(held).items():
        file = file_name(group, writer.number, writer.of)
        layouts[group] = {
            name: TensorLayout(
                shape=local.whole,
                dtype=TYPES[local.tensor.dtype],
                pieces=(Piece(file=file, start=local.start, shape=tuple(local.tensor.shape)),)
                if local.tensor.numel()
                else (),
            )
            for name, local in tensors.items()
        }
    return layouts


def joined(all_parts: list[dict[str, dict[str, TensorLayout]]]) -> CheckpointPlan:
    """Return the plan of all writers."""
    tensors: dict[str, dict[str, TensorLayout]] = {group: {} for group in GROUPS}
    for layouts in all_parts:
        for group, wholes in layouts.items():
            for name, layout in wholes.items():
                before = tensors[group][name].pieces if name in tensors[group] else ()
                tensors[group][name] = layout.model_copy(update={"pieces": (*before, *layout.pieces)})
    return CheckpointPlan(tensors=tensors)


class StoredSnapshot:
    """Tensors of a verified checkpoint folder, from which any window can be read."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises: BadFormat, OSError."""
        self.folder = folder
        self.plan = read_plan(folder)
        self.progress = Progress.model_validate_json((folder / STATE).read_bytes())
        self._open: dict[str, Any] = {}

    def names(self, group: str) -> list[str]:
        return list(self.plan.tensors[group])

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        return self.plan.tensors[group][name].shape

    def read(self, group: str, name: str, window: Window | None = None) -> torch.Tensor:
        """Return a window of a tensor, by default the whole tensor. Raises: KeyError, ValueError if it is absent."""
        layout = self.plan.tensors[group][name]
        box = window or ((0,) * len(layout.shape), layout.shape)
        if math.prod(box[1]) and overlap(((0,) * len(layout.shape), layout.shape), box) != box:
            raise ValueError(f"{name} has the shape {layout.shape}")
        tensor = torch.empty(box[1], dtype=_TYPE_OF[layout.dtype])
        for piece in layout.pieces:
            if common := overlap((piece.start, piece.shape), box):
                inner = self._file(piece.file).get_slice(name)[_slices(common, piece.start)]
                tensor[_slices(common, box[0])] = inner if common[0] else self._file(piece.file).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]


_TYPE_OF = {name: kind for kind, name in TYPES.items()}


def _slices(window: Window, base: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at - b, at - b + size) for at, size, b in zip(*window, base, strict=True))


class Snapshots:
    """Writer of snapshots, one at a time; `stall_s`: seconds for which the newest snapshot blocked the loop."""

    def __init__(self, run: RunFolder, writer: SnapshotWriter | None) -> None:
        """Prepare the writer; `writer` is None for a process that writes nothing."""
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
        """True while a snapshot is being copied or written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: LocalSnapshot) -> None:
        """Start a snapshot if there is a writer. Its tensors must not change before `before_update` returns."""
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
        """Wait for the copy; call it before changing anything that a snapshot copies."""
        if self._thread is not None and not self._copied.is_set():
            started = time.monotonic()
            self._copied.wait()
            self.stall_s += time.monotonic() - started

    def join(self) -> None:
        """Wait until the snapshot is on disk or has failed; raise other errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise the error of the last snapshot, if it has finished."""
        if self._error is not None and not self.busy:
            error, self._error = self._error, None
            raise error

    def _take(self, snapshot: LocalSnapshot, size: int, started: float, stream: Any) -> None:
        try:
            try:
                copied = {} if snapshot.tensors_frozen else snapshot.held
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
        """Return why the last snapshot could not be written; empty if it was written or is in progress.

        Each failure is returned once.
        """
        if self.busy:
            return ""
        failure, self._failure = self._failure, ""
        return failure

    def _write(
        self, copies: dict[str, Tensors], snapshot: LocalSnapshot, writer: SnapshotWriter, size: int, started: float
    ) -> None:
        name = f"{snapshot.progress.step:010d}-{self._count:06d}"
        folder, target = self._run.snapshots / f".{name}", self._run.snapshots / name
        try:
            self._write_files(folder, copies, snapshot, writer, size)
        except (OSError, SafetensorError):
            if writer.first:
                with contextlib.suppress(OSError):
                    self._await(name, writer.machine_writers[1:])
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._mark(name, writer.number, failed=True).touch()
            raise
        if not writer.first:
            self._mark(name, writer.number).touch()
            return
        try:
            self._await(name, writer.machine_writers[1:])
            self._seal(target, snapshot, writer, started)
            folder.rename(target)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            info_of(target).unlink(missing_ok=True)
            raise

    def _write_files(
        self, folder: Path, copies: dict[str, Tensors], snapshot: LocalSnapshot, writer: SnapshotWriter, size: int
    ) -> None:
        if not snapshot.journalled:
            raise OSError(errno.ENOSPC, "the rows of the last steps could not be written")
        folder.mkdir(exist_ok=True)
        for group, held in snapshot.held.items():
            tensors = _to_host(held, copy=False) if snapshot.tensors_frozen else copies[group]
            if tensors or writer.number == 0:
                save_file(tensors, folder / file_name(group, writer.number, writer.of))
        if snapshot.plan is not None:
            (folder / PLAN).write_text(snapshot.plan.model_dump_json())
            (folder / STATE).write_text(snapshot.progress.model_dump_json())
            with snapshot.metrics.open("rb") as source, (folder / METRICS).open("wb") as target:
                target.write(source.read(size))
        if snapshot.artifacts is not None:
            shutil.copytree(snapshot.artifacts, folder, dirs_exist_ok=True)

    def _seal(self, target: Path, snapshot: LocalSnapshot, writer: SnapshotWriter, started: float) -> None:
        info = SnapshotInfo(
            step=snapshot.progress.step,
            complete=snapshot.complete,
            taken_s=round(time.monotonic() - started, 3),
            stall_s=self.stall_s,
            part=writer.part and writer.part.model_copy(update={"nonce": f"{writer.part.nonce}{self._count:04x}"}),
        )
        info_of(target).write_text(info.model_dump_json())

    def _mark(self, name: str, number: int, *, failed: bool = False) -> Path:
        """Return the file by which a writer marks its part as written or failed."""
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
                time.sleep(POLL_S)
            mark.unlink()


def _to_host(tensors: Mapping[str, Local], *, copy: bool = True) -> Tensors:
    """Return tensors in host memory.

    `copy`: True also copies tensors that are in host memory already. False copies them only if they share memory,
    because safetensors rejects shared memory.
    """
    copies: Tensors = {}
    memories: set[int] = set()
    for name, local in tensors.items():
        tensor = local.tensor.detach()
        if tensor.numel():
            memory = tensor.untyped_storage().data_ptr()
            copies[name] = tensor.to("cpu", copy=copy or memory in memories).contiguous()
            memories.add(memory)
    return copies
