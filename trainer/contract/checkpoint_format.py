"""Format of a `train` checkpoint and its verification; the agent verifies without torch before the worker starts.

`plan.json` lists for each tensor which file holds which part, so any number of processes can read what any other number
wrote. Only safetensors and JSON are ever opened; a checkpoint with files of any other kind is refused.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from trainer.contract.base import Document

PLAN = "plan.json"
STATE = "state.json"
METRICS = "metrics.jsonl"
FORMAT = 1
GROUPS = ("model", "optimizer", "gradients", "best")
SUFFIXES = (".safetensors", ".json", ".jsonl", ".md")
"""Suffixes allowed for files directly in the folder. The folders of a finished model are never read back."""
MAX_HEADER = 256 << 20

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a part of a tensor."""


class BadFormat(Exception):
    """Error of a folder that is not a complete checkpoint of a format that this trainer reads."""


class RowSkip(Document):
    """Skip of the data cursor over rows that made the training diverge."""

    step: int
    """Optimizer steps done at the skip; the next step reads from row `samples`."""
    samples: int


class GuardState(Document):
    """State of the guard against bad steps."""

    bad_steps: int = 0
    """Number of latest consecutive steps that were skipped."""
    skipped: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    reported_at: int = -(2**31)
    """Step of the last event about an unusual loss or gradient norm."""
    row_skips: tuple[RowSkip, ...] = ()
    """Row skips already applied to this state."""


class Rate(Document):
    """Highest learning rate of a run."""

    lr: float
    source: str = ""
    """Publication of the rate; empty if the job gives the rate."""


class Best(Document):
    """Evaluation whose weights are saved in addition to the latest weights."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: int
    value: float
    """Value of the chosen metric."""


class ModelFingerprint(Document):
    """Hashes of a model's files other than its weights; empty if the model has none."""

    job: str = ""
    """Id of the job whose model was hashed."""
    tokens: str = ""
    """Hash of the mapping from texts to tokens."""
    marks: str = ""
    """Hash of the special tokens that are added, and of the chat template."""
    config: str = ""


class Progress(Document):
    """Progress of a training without tensors (`state.json`)."""

    model_config = ConfigDict(ser_json_inf_nan="constants")
    """A held-out loss may be infinite or NaN, and must be read back unchanged."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Rows consumed; the position of the data cursor."""
    rate: Rate | None = None
    """Learning rate chosen by the trainer at the start of the run; None if the job gives the rate."""
    micro_batch_index: int = 0
    """Micro-batches of the next step whose gradients are already accumulated (in gradients.safetensors)."""
    micro_rows: int = 0
    """Rows of each accumulated micro-batch. A plan with another size starts the step again."""
    micro_loss: float = 0.0
    """Sum of the losses of the accumulated micro-batches."""
    environment: str = ""
    """Processes, device and versions. If they differ, the data is resumed exactly, but results may differ in the
    last bit.
    """
    scaler: dict[str, Any] | None = None
    base: str = ""
    """Identity of the weights below the adapters, which no checkpoint holds; empty if the checkpoint holds all
    weights.
    """
    fingerprint: ModelFingerprint = ModelFingerprint()
    """Fingerprint of the trained model."""
    heldout_loss_before: float | None = None
    metrics_before: dict[str, float] = Field(default_factory=dict)
    """Metrics of the task, measured with the loss before the first step."""
    heldout: tuple[tuple[int, float], ...] = ()
    """Pairs (step, held-out loss) measured so far."""
    scores: tuple[tuple[int, float], ...] = ()
    """Pairs (step, chosen metric) of the evaluations after the first step."""
    scores_by: str = ""
    """Job and metric that the scores belong to."""
    best: Best | None = None
    """Best evaluation; None if its weights are not saved."""
    guard: GuardState = GuardState()
    base_samples: tuple[str, ...] | None = None


class Piece(Document):
    """Part of a tensor, stored contiguously in one file under the tensor's name."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class TensorLayout(Document):
    """Tensor and the pieces that cover it."""

    shape: tuple[int, ...]
    dtype: str
    """Type name as in safetensors: F32, BF16, …"""
    pieces: tuple[Piece, ...]


class CheckpointPlan(Document):
    """Content of `plan.json`."""

    version: int = FORMAT
    tensors: dict[str, dict[str, TensorLayout]]
    """Tensors by group, then by name."""


def file_name(group: str, number: int, of: int) -> str:
    """Return the file name of writer `number` among `of` writers."""
    return f"{group}.safetensors" if of == 1 else f"{group}-{number:05d}-of-{of:05d}.safetensors"


def read_plan(folder: Path) -> CheckpointPlan:
    """Read the plan of a checkpoint folder. Raises: BadFormat."""
    try:
        data = json.loads((folder / PLAN).read_bytes())
        version = data["version"]
        if version > FORMAT:
            raise BadFormat(f"its format is {version}, this trainer reads {FORMAT}; use a newer trainer")
        return CheckpointPlan.model_validate(data)
    except OSError:
        raise BadFormat(f"it has no {PLAN}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadFormat(f"its {PLAN} cannot be read") from None


def verify(folder: Path) -> None:
    """Check that every tensor of the plan exists, is complete, and has its type. Raises: BadFormat."""
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        if path.suffix not in SUFFIXES:
            raise BadFormat(f"it holds {path.name!r}, which is neither safetensors nor JSON")
    try:
        Progress.model_validate_json((folder / STATE).read_bytes())
    except (OSError, ValidationError):
        raise BadFormat(f"its {STATE} is absent or cannot be read") from None
    plan = read_plan(folder)
    headers: dict[str, Mapping[str, Any]] = {}
    for group in GROUPS:
        if group not in plan.tensors:
            raise BadFormat(f"its {PLAN} lacks {group}")
        for name, layout in plan.tensors[group].items():
            for piece in layout.pieces:
                if piece.file not in headers:
                    headers[piece.file] = header(folder, piece.file)
                if headers[piece.file].get(name) != (layout.dtype, piece.shape):
                    raise BadFormat(f"{piece.file} does not hold the part of {name} that {PLAN} lists")
            _check_cover(name, layout)


def has_due_row_skips(folder: Path, jumps: tuple[RowSkip, ...]) -> bool:
    """Return True if a verified folder's state has applied exactly the row skips up to its step.

    A skip due at this very step may still be missing.
    """
    progress = Progress.model_validate_json((folder / STATE).read_bytes())
    row_skips = progress.guard.row_skips
    due_jumps = tuple(jump for jump in jumps if jump.step <= progress.step)
    before = tuple(jump for jump in jumps if jump.step < progress.step)
    return row_skips in (due_jumps, before)


def header(folder: Path, file: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor of a safetensors file after checking the lengths. Raises: BadFormat."""
    if PurePosixPath(file).name != file:
        raise BadFormat(f"it names the file {file!r}, which leaves the folder")
    try:
        with (folder / file).open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER:
                raise ValueError
            entries: dict[str, Any] = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        end = max((e["data_offsets"][1] for e in entries.values()), default=0)
        if (folder / file).stat().st_size != 8 + length + end:
            raise ValueError
        return {name: (e["dtype"], tuple(e["shape"])) for name, e in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, struct.error):
        raise BadFormat(f"{file} is absent or is not a safetensors file") from None


def _check_cover(name: str, layout: TensorLayout) -> None:
    """Check that the pieces cover the tensor and do not overlap. Raises: BadFormat."""
    boxes = [(piece.start, piece.shape) for piece in layout.pieces if math.prod(piece.shape)]
    inside = all(overlap(((0,) * len(layout.shape), layout.shape), box) == box for box in boxes)
    covered = sum(math.prod(shape) for _, shape in boxes) == math.prod(layout.shape)
    are_disjoint = all(overlap(a, b) is None for number, a in enumerate(boxes) for b in boxes[:number])
    if not (inside and covered and are_disjoint):
        raise BadFormat(f"the parts of {name} overlap or leave a gap")


def overlap(first: Window, second: Window) -> Window | None:
    """Return the intersection of two windows of a tensor, or None if it is empty."""
    if len(first[0]) != len(second[0]):
        return None
    start = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    ends = (min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
    shape = tuple(end - begin for end, begin in zip(ends, start, strict=True))
    return (start, shape) if all(size > 0 for size in shape) else None
