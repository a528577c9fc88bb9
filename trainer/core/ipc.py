"""How agent and worker talk: small files in one folder, each replaced atomically. No torch in here.

The worker's status goes up, the drain request comes down, and a snapshot is a folder that is renamed into place
when it is whole; the agent uploads it and removes it.
"""

import contextlib
import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.contract.base import Document
from trainer.contract.checkpoint_format import RowSkip
from trainer.contract.documents import Cost, MemoryUse, Parallelism, Phase
from trainer.contract.train import TrainConfig


class WorkerJob(Document):
    """What the worker is told at its start (`job.json`)."""

    train: TrainConfig
    data: str
    """Path of the verified data file."""
    data_format: str
    data_sha256: str = ""
    job: str = ""
    """Its id."""
    number: int
    """Number of the attempt, for the metrics."""
    cost: Cost | None = None
    memory: MemoryUse | None = None
    """As estimated."""
    began: float = 0.0
    """Unix seconds of the agent's start."""
    save_every_s: float
    """At the most; the agent may shorten it (`RunFolder.interval`)."""
    jumps: tuple[RowSkip, ...] = ()
    """Rows that are left out, since an earlier worker of this attempt went wrong with them."""
    probe: bool = False
    """The longest rows go through once after the first step."""
    gpus: int = 0
    """GPUs that this machine was bought with; 0: it trains on the CPU."""
    parallelism: Parallelism = Parallelism()
    restore: str | None = None
    """Folder of a verified checkpoint."""


class Status(Document):
    """The worker's progress (`status.json`); the fields are those of `Heartbeat` and `Final`."""

    phase: Phase = "loading"
    message: str = ""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    heldout_loss: float | None = None
    heldout_loss_before: float | None = None
    heldout_loss_after: float | None = None
    tokens_per_s: float | None = None
    rows_per_s: float | None = None
    peak_memory_bytes: int | None = None


class SnapshotPart(Document):
    """What of a snapshot lies on this machine, where it is divided between several."""

    node: int
    nodes: int
    """Machines that hold a part; they are the first ones."""
    nonce: str
    """Of the checkpoint's folder, the same for all parts."""


class SnapshotInfo(Document):
    """What lies beside a snapshot's folder; it stays on this machine."""

    step: int
    complete: bool = False
    taken_s: float
    """Seconds until it was whole."""
    stall_s: float
    part: SnapshotPart | None = None
    """None: this machine holds all of it."""


class Ended(Document):
    """How the worker ended (`ended.json`): a launcher of several processes does not pass their exit codes on."""

    code: int
    message: str = ""
    """One line: what, where and the fix."""
    ran_out: Literal["device", "host"] | None = None
    """Whose memory, where the code is `OOM`."""
    jumps: tuple[RowSkip, ...] = ()
    """Where the code is `BACK`: the way past the bad steps."""
    bad_host: bool = False
    """The check of the devices found this machine unfit."""
    pulled: bool = False
    """Only another process's end was seen; the reason lies there."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The folder that agent and worker share."""

    root: Path

    def make(self) -> None:
        """Creates it empty."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.snapshots.mkdir(parents=True)

    def renew(self) -> None:
        """Before another worker of the same attempt: without what the last one left but its events."""
        shutil.rmtree(self.snapshots, ignore_errors=True)
        self.snapshots.mkdir()
        self.ended.unlink(missing_ok=True)

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def drain(self) -> Path:
        return self.root / "drain"

    @property
    def ended(self) -> Path:
        return self.root / "ended.json"

    @property
    def interval(self) -> Path:
        """Seconds between saves, by the agent."""
        return self.root / "interval"

    @property
    def told(self) -> Path:
        """What the worker has to tell people: a JSON list [kind, message] a line."""
        return self.root / "told.jsonl"

    @property
    def track(self) -> Path:
        """What trackers are told."""
        return self.root / "track.json"

    @property
    def track_end(self) -> Path:
        """The outcome, once there is one."""
        return self.root / "track_end"

    @property
    def heldout(self) -> Path:
        """Held-out losses so far: a JSON list of [step, loss]."""
        return self.root / "heldout.json"

    def waiting(self) -> list[Path]:
        """Whole snapshots, oldest first; those being written start with a dot."""
        return sorted(p for p in self.snapshots.iterdir() if not p.name.startswith("."))


class MessageWriter:
    """Tells people, by the agent; what cannot be written on a full disk is written later."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._pending: list[tuple[str, str]] = []

    def __call__(self, kind: str, message: str) -> None:
        """`kind`: as in `Told`."""
        print(message, flush=True)
        self._pending.append((kind, message))
        self.flush()

    def flush(self) -> None:
        """Whole lines only: a reader takes none before its end."""
        with contextlib.suppress(OSError):
            while self._pending:
                with self._run.told.open("a") as file:
                    file.write(json.dumps(self._pending[0]) + "\n")
                self._pending.pop(0)


ROWS, INDEX, NOTE = "rows.bin", "rows.index", "rows.json"
"""What the task made of the rows, where each begins, and what is known of all; the last is written when the others are
whole."""
END = struct.Struct("=Q")


def rows_note(folder: Path) -> dict[str, Any] | None:
    """What is known of the rows in a folder; None while they are not whole."""
    try:
        found = json.loads((folder / NOTE).read_text())
        with (folder / INDEX).open("rb") as index:
            index.seek(-END.size, os.SEEK_END)
            (end,) = END.unpack(index.read())
        whole = end == (folder / ROWS).stat().st_size
    except (OSError, ValueError):
        return None
    return found if whole and isinstance(found, dict) else None


def info_of(snapshot: Path) -> Path:
    """Where its `SnapshotInfo` lies: beside it, as all that is in the folder is the checkpoint's."""
    return snapshot.with_name(f".{snapshot.name}.json")


def replace(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new content, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
