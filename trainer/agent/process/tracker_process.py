"""Sender of a run's figures to one tracker.

The agent starts `python -m trainer.agent.process.tracker_process RUN_FOLDER wandb|mlflow`. The process may fail, hang
or be slow, because training and agent do not wait for it. It follows the journal, so it sends the figures that count,
and skips those that the tracker's run already has.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.contract.base import Document
from trainer.contract.checkpoint_format import METRICS
from trainer.contract.metrics import MetricsConfig, MlflowConfig, WandbConfig
from trainer.core.ipc import MessageWriter, RunFolder
from trainer.core.parent_death import die_with_parent

POLL_S = 1.0
NAMES = ("loss", "lr", "grad_norm", "tokens", "seconds")
PARAMETER = 500
"""Largest number of characters that MLflow accepts in a parameter."""
SENT = 200
"""Rows sent in one request."""
CONTINUES = "Training continues without it"
Row = Mapping[str, Any]


class TrackJob(Document):
    """Parameters of a tracker process (`track.json`)."""

    metrics: MetricsConfig
    run: str
    """Name of the job's run, the same for all its attempts."""
    parameters: dict[str, Any]
    folder: str
    """Folder for files of the tracker."""


class Tracker(Protocol):
    """Run of a tracker."""

    last: int
    """Step of the last row that the tracker has."""
    judged: int
    """Step of the last held-out loss that the tracker has; -1: none."""

    def rows(self, rows: list[Row]) -> None: ...

    def heldout(self, step: int, loss: float) -> None: ...

    def finish(self, outcome: str) -> None: ...


class Wandb:
    def __init__(self, config: WandbConfig, job: TrackJob) -> None:
        import wandb

        if config.mode == "online":
            os.environ["WANDB_API_KEY"] = os.environ.get(config.secret, "")
        self._run: Any = wandb.init(
            project=config.project, entity=config.entity, id=job.run, name=job.run, resume="allow", mode=config.mode,
            dir=job.folder, config=job.parameters, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        for part in ("train", "eval"):
            self._run.define_metric(f"{part}/step")
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/step")
        summary = dict(self._run.summary)
        self.last, self.judged = int(summary.get("train/step", 0)), int(summary.get("eval/step", -1))

    def rows(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log({f"train/{name}": row[name] for name in ("step", *NAMES) if row.get(name) is not None})

    def heldout(self, step: int, loss: float) -> None:
        self._run.log({"eval/step": step, "eval/loss": loss})

    def finish(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome in ("completed", "drained", "deadman") else 1)


class Mlflow:
    ENDS: Mapping[str, str] = {"completed": "FINISHED", "drained": "KILLED", "deadman": "KILLED"}

    def __init__(self, config: MlflowConfig, job: TrackJob) -> None:
        if config.secret:
            os.environ["MLFLOW_TRACKING_TOKEN"] = os.environ.get(config.secret, "")
        if config.uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(config.uri)
        existing = self._client.get_experiment_by_name(config.experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(config.experiment)
        runs = self._client.search_runs([experiment], f"tags.`gpubroker.run` = '{job.run}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            created = self._client.create_run(experiment, run_name=job.run, tags={"gpubroker.run": job.run})
            self._id = created.info.run_id
            for name, value in _flat(job.parameters):
                self._client.log_param(self._id, name, str(value)[:PARAMETER])
        self.last, self.judged = self._latest("train/loss", 0), self._latest("eval/loss", -1)

    def _latest(self, name: str, default: int) -> int:
        return max((figure.step for figure in self._client.get_metric_history(self._id, name)), default=default)

    def rows(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        figures = [
            Metric(f"train/{name}", float(row[name]), int(row["time"] * 1000), row["step"])
            for row in rows
            for name in NAMES
            if row.get(name) is not None
        ]
        self._client.log_batch(self._id, metrics=figures)

    def heldout(self, step: int, loss: float) -> None:
        self._client.log_metric(self._id, "eval/loss", loss, step=step)

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self._id, self.ENDS.get(outcome, "FAILED"))


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        elif value not in (None, [], ""):
            yield f"{above}{name}", value


class Follower:
    """Reader of new rows in a growing journal, which a restarted worker truncates."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end, self._last = 0, b""

    def rows(self) -> list[Row]:
        """Return the complete rows since the last call; all rows if the journal was replaced."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    file.seek(0)
                    self._end = 0
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        for line in lines:
            self._end, self._last = self._end + len(line) + 1, line + b"\n"
        return [json.loads(line) for line in lines]


def follow(run: RunFolder, tracker: Tracker) -> str:
    """Send rows until the agent reports the outcome, and return the outcome."""
    journal = Follower(run.root / METRICS)
    while True:
        ended = run.track_end.read_text() if run.track_end.exists() else ""
        rows = [row for row in journal.rows() if row["step"] > tracker.last]
        for at in range(0, len(rows), SENT):
            tracker.rows(rows[at : at + SENT])
            tracker.last = rows[min(at + SENT, len(rows)) - 1]["step"]
        for step, loss in _heldout(run):
            if step > tracker.judged and math.isfinite(loss):
                tracker.heldout(step, loss)
                tracker.judged = step
        if ended:
            return ended
        time.sleep(POLL_S)


def _heldout(run: RunFolder) -> list[tuple[int, float]]:
    with contextlib.suppress(OSError, ValueError):
        return [(int(step), float(loss)) for step, loss in json.loads(run.heldout.read_text())]
    return []


def main(root: Path, kind: str) -> int:
    """Run the process and return 0; failures are reported, not returned."""
    run = RunFolder(root=root)
    job = TrackJob.model_validate_json(run.track.read_bytes())
    try:
        tracker: Tracker
        if kind == "wandb":
            assert job.metrics.wandb is not None
            tracker = Wandb(job.metrics.wandb, job)
        else:
            assert job.metrics.mlflow is not None
            tracker = Mlflow(job.metrics.mlflow, job)
        tracker.finish(follow(run, tracker))
    except ImportError as e:
        MessageWriter(run)(
            "tracker_failed", f"{kind}: {e}; install gpubroker[trackers] where the trainer runs. {CONTINUES}"
        )
    except Exception as e:  # libraries of trackers raise errors of any kind
        line = (str(e).strip().splitlines() or ["no message"])[0]
        MessageWriter(run)("tracker_failed", f"{kind}: {type(e).__name__}: {line[:300]}. {CONTINUES}")
    return 0


if __name__ == "__main__":
    die_with_parent(os.getppid())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # A terminal signals the whole group; the agent decides about the end.
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
