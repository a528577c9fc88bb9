"""TensorBoard, Weights & Biases and MLflow get every step once through all resumes, and never delay the training."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.harness import FAST, Bench, until
from tests.trainer.support.tiny_jobs import KINDS
from trainer.agent.process import tracker_process as track
from trainer.contract.documents import Outcome
from trainer.contract.metrics import MetricsConfig, MlflowConfig
from trainer.contract.train import CheckpointConfig, TrainConfig
from trainer.core.ipc import RunFolder

KEY = "0123456789abcdef0123456789abcdef01234567"


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return (step, value) pairs of a tag, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = folder.iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    return [(e.step, v.tensor.float_val[0]) for e in events for v in e.summary.value if v.tag == tag]


def test_tensorboard_has_every_step_once_after_many_resumes(tmp_path: Path) -> None:
    kind = KINDS["causal_lm lora"]
    train, data = tiny_jobs.train(kind, tmp_path / "model"), tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    done = workers.resumed(tmp_path / "rough", train, data)
    rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    history = json.loads((done / "eval.json").read_text())["history"]
    for folder in (
        done / "tensorboard",
        tmp_path / "rough" / "last" / "tensorboard",
    ):  # of the results, and of the running job
        for tag, name in {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm"}.items():
            assert scalars(folder, tag) == [(row["step"], pytest.approx(row[name])) for row in rows]
        assert scalars(folder, "eval/loss") == [(one["step"], pytest.approx(one["loss"])) for one in history]


def journal(run: RunFolder, steps: range) -> None:
    rows = [
        {"step": n, "loss": 1 / n, "lr": 0.1, "grad_norm": None, "tokens": 5, "seconds": 1, "time": 1e9 + n}
        for n in steps
    ]
    (run.root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_one_run_of_mlflow_for_all_attempts_without_a_step_doubled(tmp_path: Path) -> None:
    import mlflow

    config = MlflowConfig(uri=(tmp_path / "mlruns").as_uri())
    job = track.TrackJob(metrics=MetricsConfig(mlflow=config), run="job-1", parameters={"optim": {"lr": 1}}, folder="")
    for attempt, steps, outcome in ((1, range(1, 8), "drained"), (2, range(1, 12), "completed")):
        run = RunFolder(root=tmp_path / str(attempt))
        run.make()
        journal(run, steps)
        run.heldout.write_text(json.dumps([[0, 2.5], [4, 1.5], [7, float("nan")]]))
        run.track_end.write_text(outcome)
        tracker = track.Mlflow(config, job)
        tracker.finish(track.follow(run, tracker))
    client = mlflow.MlflowClient(config.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("gpubroker").experiment_id])
    assert (found.info.status, found.data.params) == ("FINISHED", {"optim.lr": "1"})
    had = [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, "train/loss")]
    assert sorted(one.step for one in client.get_metric_history(found.info.run_id, "eval/loss")) == [0, 4]
    assert sorted(had) == [(n, 1 / n) for n in range(1, 12)]


def test_ctrl_c_does_not_end_a_tracker_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends SIGINT to the whole process group; the agent drains and ends the trackers itself."""
    import mlflow

    config, run = MlflowConfig(uri=(tmp_path / "mlruns").as_uri()), RunFolder(root=tmp_path / "run")
    run.make()
    journal(run, range(1, 4))
    job = track.TrackJob(metrics=MetricsConfig(mlflow=config), run="job-1", parameters={}, folder="")
    run.track.write_text(job.model_dump_json())
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.agent.process.tracker_process", str(run.root), "mlflow"]
    ) as tracker:
        until(lambda: list((tmp_path / "mlruns").glob("*/*/metrics/train/loss")), "its first figures")
        tracker.send_signal(signal.SIGINT)
        run.track_end.write_text("drained")
        assert tracker.wait(120) == 0
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(config.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("gpubroker").experiment_id])
    assert found.info.status == "KILLED"
    assert len(client.get_metric_history(found.info.run_id, "train/loss")) == 3


def test_a_journal_that_is_cut_back_is_read_again(tmp_path: Path) -> None:
    run = RunFolder(root=tmp_path / "run")
    run.make()
    follower = track.Follower(run.root / "metrics.jsonl")
    assert follower.rows() == []
    seen = []
    for steps in (range(1, 4), range(1, 6), range(1, 3), range(1, 9)):
        journal(run, steps)
        seen.append([row["step"] for row in follower.rows()])
    assert seen == [[1, 2, 3], [4, 5], [1, 2], [3, 4, 5, 6, 7, 8]]


def wandb_records(log: bytes) -> Iterator[bytes]:
    """Return the records of a .wandb file: LevelDB's log format, with a header of 7 bytes in the first block."""
    block, at, parts = 32_768, 7, b""
    while at + 7 <= len(log):
        if block - at % block < 7:  # no space for a header: zeros up to the next block
            at += block - at % block
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        parts += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_trackers_that_work_and_that_fail_next_to_a_training(bench: Bench, tiny_models: dict[str, Path]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    kind = KINDS["causal_lm lora"]
    made = tiny_jobs.train(kind, bench.folder / "model").model_dump()
    metrics = {
        "wandb": {"project": "p", "mode": "offline"},
        "mlflow": {"uri": "http://127.0.0.1:9/", "secret": "MLFLOW_KEY"},
    }
    train = TrainConfig.model_validate({**made, "metrics": metrics, "samples": {}})
    agent = bench.start(
        train=train, data=bench.data(tiny_jobs.data(kind), "csv"), checkpoint=CheckpointConfig(every_s=300),
        limits=FAST, secrets={"MLFLOW_KEY": KEY}, env={"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
    )  # fmt: skip
    final = agent.wait()
    assert final.outcome is Outcome.COMPLETED, final.message
    failed = [message.message for message in final.messages if message.kind == "tracker_failed"]
    assert len(failed) == 1
    assert failed[0].startswith("mlflow: ")
    assert KEY not in agent.log + final.model_dump_json()

    (file,) = (bench.folder / "work" / agent.attempt / "wandb").glob("offline-run-*-job1/*.wandb")
    found: list[dict[str, Any]] = []
    for data in wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        found.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    assert [message["train/step"] for message in found if "train/step" in message] == list(
        range(1, tiny_jobs.STEPS + 1)
    )
    assert next(message["eval/step"] for message in found if "eval/step" in message) == 0
