"""What a `train` checkpoint holds, and whether a folder holds it. No torch in here: the agent checks before the worker.

`plan.json` says of each tensor which file has which part of it, so any number of processes can read what any other
number wrote. Only safetensors and JSON are ever opened; whatever else lies beside them refuses the checkpoint.
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
"""Of files that lie beside the tensors; the folders of a finished model are never read back."""
MAX_HEADER = 256 << 20

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and its shape."""


class BadFormat(Exception):
    """The folder is not a whole checkpoint of a format that this trainer knows; the message says why."""


class RowSkip(Document):
    """Rows that are left out since the training went wrong with them."""

    step: int
    """Before its next step, when so many are done, the data goes on at `samples`."""
    samples: int


class GuardState(Document):
    """What the guard remembers."""

    bad: int = 0
    """Latest steps in a row that were left out."""
    skipped: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    told: int = -(2**31)
    """Step at which something strange was last told."""
    jumps: tuple[RowSkip, ...] = ()
    """Those made on the way here."""


class Rate(Document):
    """The highest learning rate of a run."""

    lr: float
    source: str = ""
    """Where it was published; empty: the job says it."""


class Best(Document):
    """The evaluation whose weights are kept beside the last ones."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: int
    value: float
    """Of the chosen metric."""


class ModelFingerprint(Document):
    """Hashes of what a model has beside its weights; empty: it has none."""

    job: str = ""
    """That it is of."""
    tokens: str = ""
    """Which tokens texts become."""
    marks: str = ""
    """Special tokens that are added, and the chat template."""
    config: str = ""


class Progress(Document):
    """`state.json`: where the training stands, without tensors."""

    model_config = ConfigDict(ser_json_inf_nan="constants")
    """A held-out loss may be no finite number, and must come back as it was."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """The data cursor."""
    rate: Rate | None = None
    """That the run began with, where it was left to the trainer."""
    micro_batch_index: int = 0
    """Micro-batches of the next step whose gradients are already accumulated (in gradients.safetensors)."""
    micro_rows: int = 0
    """Rows of each of these; a plan with others begins the step again."""
    micro_loss: float = 0.0
    """Their summed loss."""
    made_on: str = ""
    """Processes, device and versions: where they differ, going on is exact in the data but not to the last bit."""
    scaler: dict[str, Any] | None = None
    base: str = ""
    """The weights that the adapters belong to, which are in no checkpoint; empty where all weights are in it."""
    likeness: ModelFingerprint = ModelFingerprint()
    """Of the model that was trained."""
    heldout_loss_before: float | None = None
    metrics_before: dict[str, float] = Field(default_factory=dict)
    """The task's own, measured with the loss before the first step."""
    heldout: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss) measured so far."""
    scores: tuple[tuple[int, float], ...] = ()
    """(step, chosen metric) of the evaluations after the first step."""
    scores_by: str = ""
    """The job that they are of, and the metric."""
    best: Best | None = None
    """None: none are kept."""
    care: GuardState = GuardState()
    base_samples: tuple[str, ...] | None = None


class Piece(Document):
    """A part of a tensor, which lies whole in one file under the tensor's name."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Whole(Document):
    """A tensor, and the pieces that make it up."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors has it: F32, BF16, ..."""
    pieces: tuple[Piece, ...]


class CheckpointPlan(Document):
    """`plan.json`."""

    version: int = FORMAT
    tensors: dict[str, dict[str, Whole]]
    """By group and name."""


def file_name(group: str, number: int, of: int) -> str:
    """The file of writer `number` of `of`."""
    return f"{group}.safetensors" if of == 1 else f"{group}-{number:05d}-of-{of:05d}.safetensors"


def read_plan(folder: Path) -> CheckpointPlan:
    """Raises BadFormat."""
    try:
        data = json.loads((folder / PLAN).read_bytes())
        version = data["version"]
        if version > FORMAT:
            raise BadFormat(f"its format is {version}, this trainer knows {FORMAT}; take a newer trainer")
        return CheckpointPlan.model_validate(data)
    except OSError:
        raise BadFormat(f"it has no {PLAN}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadFormat(f"its {PLAN} cannot be read") from None


def verify(folder: Path) -> None:
    """Checks that every tensor of the plan is there, whole, and of its type. Raises BadFormat."""
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
        for name, whole in plan.tensors[group].items():
            for piece in whole.pieces:
                if piece.file not in headers:
                    headers[piece.file] = header(folder, piece.file)
                if headers[piece.file].get(name) != (whole.dtype, piece.shape):
                    raise BadFormat(f"{piece.file} does not hold the part of {name} that {PLAN} says")
            _tiled(name, whole)


def on_the_way(folder: Path, jumps: tuple[RowSkip, ...]) -> bool:
    """Whether a verified folder's state has made the jumps that lie before it, and no others."""
    progress = Progress.model_validate_json((folder / STATE).read_bytes())
    made = progress.care.jumps
    due = tuple(jump for jump in jumps if jump.step <= progress.step)
    before = tuple(jump for jump in jumps if jump.step < progress.step)
    return made in (due, before)


def header(folder: Path, file: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """(type, shape) of each tensor in a safetensors file, the lengths checked. Raises BadFormat."""
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
        raise BadFormat(f"{file} is absent or is no safetensors file") from None


def _tiled(name: str, whole: Whole) -> None:
    """The pieces cover the tensor, and none covers what another does. Raises BadFormat."""
    boxes = [(piece.start, piece.shape) for piece in whole.pieces if math.prod(piece.shape)]
    inside = all(overlap(((0,) * len(whole.shape), whole.shape), box) == box for box in boxes)
    covered = sum(math.prod(shape) for _, shape in boxes) == math.prod(whole.shape)
    apart = all(overlap(a, b) is None for number, a in enumerate(boxes) for b in boxes[:number])
    if not (inside and covered and apart):
        raise BadFormat(f"the parts of {name} do not make it up")


def overlap(one: Window, other: Window) -> Window | None:
    """What two windows of a tensor have in common; None where that is nothing."""
    if len(one[0]) != len(other[0]):
        return None
    start = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True))
    shape = tuple(end - begin for end, begin in zip(ends, start, strict=True))
    return (start, shape) if all(size > 0 for size in shape) else None
