"""TensorBoard event files, rebuilt from the journal after a resume so that each step occurs once."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
FLUSH_S = 10.0
"""Seconds between writes to the disk; each write blocks the training."""
TAGS = {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm"}
Heldout = Iterable[tuple[int, float]]
"""Pairs (step, loss)."""


class Board:
    """TensorBoard event file. A write error is reported and closes the file; the training continues."""

    def __init__(self, folder: Path, report: Callable[[str, str], None]) -> None:
        self._folder, self._report = folder, report
        self._writer: Any = None
        self._flushed = 0.0
        self._now = 0.0
        """Unix seconds of the latest row."""

    def begin(self, metrics: Path, heldout: Heldout) -> None:
        """Replace the existing files with the rows of a journal and the held-out losses so far."""
        losses = dict(heldout)
        try:
            from tensorboardX.record_writer import RecordWriter

            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            self._now = rows[0]["time"] if rows else time.time()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._writer = RecordWriter(str(self._folder / f"events.out.tfevents.{int(self._now)}.gpubroker"))
            self._write_event(file_version="brain.Event:2")
        except Exception as e:  # an error of a library or the disk; metrics.jsonl has the same data
            return self._stop(e)
        if 0 in losses:
            self.heldout(0, losses[0])
        for row in rows:
            self.step(row)
            if row["step"] in losses:
                self.heldout(row["step"], losses[row["step"]])

    def step(self, row: Mapping[str, Any]) -> None:
        """Add a row of the journal."""
        self._now = row["time"]
        scalars = {tag: row[name] for name, tag in TAGS.items()}
        if row["seconds"]:
            scalars["train/tokens_per_s"] = row["tokens"] / row["seconds"]
        self._scalars(row["step"], scalars)

    def heldout(self, step: int, loss: float) -> None:
        self._scalars(step, {"eval/loss": loss})

    def close(self) -> None:
        """Write everything to the disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        if self._writer is None:
            return
        try:
            from tensorboardX.proto.summary_pb2 import Summary

            values = [
                Summary.Value(tag=tag, simple_value=value)
                for tag, value in scalars.items()
                if value is not None and math.isfinite(value)
            ]
            self._write_event(step=step, summary=Summary(value=values))
            if time.monotonic() - self._flushed > FLUSH_S:
                self._flushed = time.monotonic()
                self._writer.flush()
        except Exception as e:
            self._stop(e)

    def _write_event(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=self._now, **fields).SerializeToString())

    def _stop(self, error: Exception) -> None:
        self._writer = None
        line = f"{type(error).__name__}: {error}"
        self._report("tracker_failed", f"tensorboard: {line}; training continues, and metrics.jsonl has the same data")


def write(folder: Path, metrics: Path, heldout: Heldout, report: Callable[[str, str], None]) -> None:
    """Write the event files of a finished job's results."""
    board = Board(folder / FOLDER, report)
    board.begin(metrics, heldout)
    board.close()
