"""Metrics of a run: `metrics.jsonl` with one row for every step, TensorBoard, trackers, status and log."""

import contextlib
import json
import math
import shutil
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.checkpoint_format import METRICS, Progress
from trainer.core.ipc import replace
from trainer.training.setup import TrainingSetup
from trainer.training.step import CompletedStep
from trainer.training.tensorboard import FOLDER, Board

SPEED_STEPS = 20
"""Number of latest steps over which the speed is averaged."""


class Journal:
    """Writer of `metrics.jsonl`; rows that a full disk rejects wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._pending: list[str] = []

    def begin(self, source: Path | None = None) -> None:
        """Start empty, or with the rows of a checkpoint. Raises: OSError."""
        if source is None:
            self._path.write_bytes(b"")
        else:
            shutil.copyfile(source, self._path)
        self._size = self._path.stat().st_size

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; NaN and infinity become null, because JSON has neither."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._pending.append(json.dumps(plain) + "\n")
        self.flush()

    def flush(self) -> bool:
        """Write the waiting rows and return True if all are on disk; overwrite a row that a full disk truncated."""
        try:
            while self._pending:
                data = self._pending[0].encode()
                with self._path.open("r+b") as file:
                    file.seek(self._size)
                    file.write(data)
                    file.truncate()
                self._size += len(data)
                self._pending.pop(0)
        except OSError:
            return False
        return True


class RunMetrics:
    """Recorder of steps and evaluations; the first process writes the files."""

    def __init__(self, setup: TrainingSetup, journal: Journal) -> None:
        self._setup, self._report, self._run, self._journal = setup, setup.report, setup.run, journal
        self._main = setup.trained.accelerator.is_main_process
        self._board = Board(setup.run.root / FOLDER, setup.report.event)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=SPEED_STEPS)
        """Seconds, tokens and rows of the latest steps."""

    def begin(self, progress: Progress) -> None:
        """Begin with the journal and the held-out losses of a checkpoint."""
        if self._main:
            self._board.begin(self._run.root / METRICS, progress.heldout)
            self._publish_heldout(progress)

    def step(self, step: CompletedStep) -> None:
        """Record a completed step."""
        row, number, rows = step.row, step.progress.step, self._setup.config.global_batch_rows
        self._recent.append((step.seconds, step.tokens, rows))
        seconds = sum(s for s, _, _ in self._recent)
        if self._main:
            line = {"step": number, **row, "tokens": step.tokens, "seconds": round(step.seconds, 4)}
            line |= {"time": round(time.time(), 3), "attempt": self._setup.job.number}
            self._journal.add(line)
            self._board.step(line)
        self._report.set(
            number,
            phase="training",
            message="",
            loss=row["loss"] if math.isfinite(row["loss"]) else self._report.status.loss,
            tokens_per_s=sum(t for _, t, _ in self._recent) / seconds,
            rows_per_s=sum(r for _, _, r in self._recent) / seconds,
        )
        self._report.log(
            f"step {number}/{self._setup.total_steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{self._report.status.tokens_per_s:.0f} tokens/s  {step.seconds:.2f} s"
        )

    def heldout(self, progress: Progress, loss: float, metrics: Mapping[str, float]) -> None:
        """Record an evaluation of the current weights."""
        self._report.set(progress.step, heldout_loss=loss)
        self._board.heldout(progress.step, loss)
        if self._main:
            self._publish_heldout(progress)
        scores = "".join(f", {name} {value:.4f}" for name, value in metrics.items())
        self._report.log(f"held-out loss after {progress.step} steps: {loss:.4f}{scores}")

    def close(self) -> None:
        """Write the latest rows of TensorBoard, because the process ends without the interpreter's teardown."""
        with contextlib.suppress(OSError):  # disk full; metrics.jsonl has the same data
            self._board.close()

    def _publish_heldout(self, progress: Progress) -> None:
        """Write the held-out losses for the trackers."""
        with contextlib.suppress(OSError):  # disk full; the next file contains all
            replace(self._run.heldout, json.dumps(progress.heldout))
