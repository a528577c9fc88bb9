"""Files in one folder through which agent and worker communicate, each replaced atomically; imports no torch.

The worker writes its status, the agent writes the drain request. A snapshot is a folder that is renamed when complete;
the agent uploads and removes it.
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
    """Parameters of the worker (`job.json`)."""

    train: TrainConfig
    data: str
    """Path of the verified data file."""
    data_format: str
    data_sha256: str = ""
    date: str = ""
    """Date of the job, see `AttemptSpec.date`."""
    job: str = ""
    """Id of the job."""
    number: int
    """Number of the attempt, for the metrics."""
    cost: Cost | None = None
    memory: MemoryUse | None = None
    """Estimated memory; None: not estimated."""
    began: float = 0.0
    """Start of the agent in Unix seconds."""
    save_every_s: float
    """Largest seconds between saves; the agent may shorten them (`RunFolder.interval`)."""
    jumps: tuple[RowSkip, ...] = ()
    """Rows that are left out, because they made an earlier worker of this attempt diverge."""
    probe: bool = False
    """True: the longest rows are tried once after the first step."""
    gpus: int = 0
    """GPUs of the rented machine; 0: training on the CPU."""
    parallelism: Parallelism = Parallelism()
    restore: str | None = None
    """Folder of a verified checkpoint; None: start from the beginning."""


class Status(Document):
    """Progress of the worker (`status.json`); the fields are those of `Heartbeat` and `Final`."""

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
    """Part of a snapshot on this machine, if the snapshot is divided between machines."""

    node: int
    nodes: int
    """Number of machines that hold a part; these are nodes 0 to `nodes` - 1."""
    nonce: str
    """Nonce of the checkpoint's folder, the same for all parts."""


class SnapshotInfo(Document):
    """Description of a snapshot, stored next to its folder; it stays on this machine."""

    step: int
    complete: bool = False
    taken_s: float
    """Seconds until the snapshot was complete."""
    stall_s: float
    part: SnapshotPart | None = None
    """None: this machine holds the whole snapshot."""


class Ended(Document):
    """Report of a worker's end (`ended.json`), because the launcher of several workers returns only one exit code."""

    code: int
    message: str = ""
    """One line: place, problem and fix."""
    ran_out: Literal["device", "host"] | None = None
    """Memory that ran out if the code is `OOM`."""
    jumps: tuple[RowSkip, ...] = ()
    """Row skips past the bad steps if the code is `BACK`."""
    bad_host: bool = False
    """True if the device check found this machine unfit."""
    failed_by_peer: bool = False
    """True if the worker failed only because another process ended; that process reports the reason."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Folder shared by agent and worker."""

    root: Path

    def make(self) -> None:
        """Create the folder empty."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.snapshots.mkdir(parents=True)

    def renew(self) -> None:
        """Prepare for another worker of the same attempt: remove what the last worker left, except its events."""
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
        """File with the seconds between saves, written by the agent."""
        return self.root / "interval"

    @property
    def messages_file(self) -> Path:
        """File with the worker's messages: a JSON list [kind, message] a line."""
        return self.root / "messages.jsonl"

    @property
    def track(self) -> Path:
        """File with the parameters of trackers."""
        return self.root / "track.json"

    @property
    def track_end(self) -> Path:
        """File with the outcome, once it exists."""
        return self.root / "track_end"

    @property
    def heldout(self) -> Path:
        """File with the held-out losses so far: a JSON list of [step, loss]."""
        return self.root / "heldout.json"

    def waiting(self) -> list[Path]:
        """Return the complete snapshots, oldest first; partial ones start with a dot."""
        return sorted(p for p in self.snapshots.iterdir() if not p.name.startswith("."))


class MessageWriter:
    """Writer of messages that the agent forwards; messages that a full disk rejects are written later."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._pending: list[tuple[str, str]] = []

    def __call__(self, kind: str, message: str) -> None:
        """Write a message; `kind` as in `AgentMessage`."""
        print(message, flush=True)
        self._pending.append((kind, message))
        self.flush()

    def flush(self) -> None:
        """Write complete lines only, because a reader ignores a line without its end."""
        with contextlib.suppress(OSError):
            while self._pending:
                with self._run.messages_file.open("a") as file:
                    file.write(json.dumps(self._pending[0]) + "\n")
                self._pending.pop(0)


ROWS, INDEX, NOTE = "rows.bin", "rows.index", "rows.json"
"""Tokenised rows, the start of each, and a note on all; the note is written after the others are complete."""
END = struct.Struct("=Q")


def rows_note(folder: Path) -> dict[str, Any] | None:
    """Return the note on the token cache in a folder; None while it is incomplete."""
    try:
        note = json.loads((folder / NOTE).read_text())
        with (folder / INDEX).open("rb") as index:
            index.seek(-END.size, os.SEEK_END)
            (end,) = END.unpack(index.read())
        complete = end == (folder / ROWS).stat().st_size
    except (OSError, ValueError):
        return None
    return note if complete and isinstance(note, dict) else None


def info_of(snapshot: Path) -> Path:
    """Return the path of a snapshot's `SnapshotInfo`: next to the folder, because all files in it are uploaded."""
    return snapshot.with_name(f".{snapshot.name}.json")


def replace(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
