"""A full disk, or a limit on file sizes, delays saves but not the training, and never leaves partial results."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.harness import until
from tests.trainer.support.tiny_jobs import KINDS
from tests.trainer.support.workers import HANGS_S, Harm, Worker
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.standalone import run as standalone
from trainer.training.metrics_log import Journal

KIND = KINDS["causal_lm full"]
SMALL = 16 << 10
"""Bytes that a file may have: enough for status and metrics, not for weights."""


def cramped(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))


def cramped_and_patient(rank: int) -> None:
    """Fill the disk; retry until space is free, however late this test frees it."""
    from trainer.training import result_writer as results

    cramped(rank)
    results.PAUSES_S = (0.5,) * 2 * HANGS_S  # type: ignore[assignment]


def begun(folder: Path, harm: Harm) -> Worker:
    """Return a worker that cannot write its weights."""
    data = folder / "rows.csv"
    data.write_bytes(tiny_jobs.data(KIND))
    train = TrainConfig.model_validate({**tiny_jobs.train(KIND, folder / "model").model_dump(), "samples": {}})
    return Worker(folder / "run", train, data).start(harm)


def events(worker: Worker) -> list[str]:
    messages_file = worker.run.messages_file
    return [json.loads(line)[1] for line in messages_file.read_text().splitlines()] if messages_file.exists() else []


def test_training_continues_and_results_are_written_once_there_is_space(tmp_path: Path) -> None:
    worker = begun(tmp_path, cramped_and_patient)
    until(lambda: any("the results could not be written" in e for e in events(worker)), "a failed save of the results")
    assert worker.process.is_alive()
    assert not worker.run.waiting()
    assert worker.status.step == tiny_jobs.STEPS
    assert worker.process.pid is not None
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert worker.end().code == ExitCode.COMPLETED
    assert len((worker.last / "metrics.jsonl").read_text().splitlines()) == tiny_jobs.STEPS
    assert any("the one before it counts" in e and "too large" in e.lower() for e in events(worker)), events(worker)

    calm = workers.finished(tmp_path / "calm", worker.train, tmp_path / "rows.csv")
    assert workers.story(worker.last) == workers.story(calm)


def test_a_job_without_space_for_its_results_fails(tmp_path: Path) -> None:
    worker = begun(tmp_path, cramped)
    ended = worker.end()
    assert ended.code == ExitCode.INFRASTRUCTURE
    assert "the results could not be written" in ended.message
    assert re.search(r"about [\d.]+ [kM]B are wanted, [\d.]+ [MG]B are free at /", ended.message)
    assert "no file may have more than 16.4 kB; raise that limit (ulimit -f), or free space there" in ended.message
    assert "saved at step" not in ended.message
    assert not worker.run.waiting()
    assert [p.name for p in worker.run.snapshots.iterdir()] == [], "what could not be finished takes no space"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_training_survives_results_without_disk_space(tmp_path: Path) -> None:
    script = 'exec "$0" -m tests.trainer.support.small_disk "$1"'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, sys.executable, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * HANGS_S, check=False)
    if "permitted" in done.stderr or "denied" in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    steps = tiny_jobs.STEPS
    assert (document["code"], document["left"]) == (ExitCode.INFRASTRUCTURE, [[steps, False]]), document
    assert re.search(r"about [\d.]+ [kM]B are wanted, [\d.]+ ([kM]B|bytes) are free at /", document["message"])
    assert (
        f"; free space there, or use a larger disk; the training itself is saved at step {steps}" in document["message"]
    )
    assert (document["again"], document["same"]) == (ExitCode.COMPLETED, True)


def alone(*argv: str) -> tuple[int, str]:
    """Run a process that cannot write large files; return (exit code, final message)."""

    def cramp() -> None:
        cramped(0)

    done = subprocess.run(
        [sys.executable, "-m", *argv], capture_output=True, text=True, timeout=HANGS_S, check=False, preexec_fn=cramp
    )
    return done.returncode, done.stderr.splitlines()[-1]


def test_a_copy_without_disk_space_reports_the_bytes_needed(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("q,a\n" + "word,meaning\n" * 6_000)
    (tmp_path / "done/adapter").mkdir(parents=True)
    (tmp_path / "done/adapter/weights.safetensors").write_bytes(bytes(4 * SMALL))
    place = tmp_path / "place"
    place.mkdir()
    train = {"model": "owner/name", "data": {"path": "rows.csv", "prompt": "{q}", "completion": "{a}"}}
    config = tmp_path / "job.json"
    config.write_text(json.dumps({**train, "output": {"copy_to": {"url": place.as_uri()}}}))
    limit = "and no file may have more than 16.4 kB; raise that limit (ulimit -f), or free space there"

    code, said = alone("trainer.publish", str(tmp_path / "done"), "--config", str(config))
    assert code == ExitCode.INFRASTRUCTURE
    assert said.startswith(f"output.copy_to: {place.as_uri()} is full: about 65.5 kB are wanted, ")
    assert said.endswith(limit)

    output = tmp_path / "out"
    code, said = alone("trainer", "--config", str(config), "--output", str(output))
    assert code == ExitCode.INFRASTRUCTURE
    assert said.startswith(f"{output}: the copy of the data could not be written: about 78.0 kB are wanted, ")
    assert said.endswith(f"{limit}; start again then, and the run resumes")


def test_results_that_do_not_fit_next_to_their_checkpoint_are_named(tmp_path: Path) -> None:
    store, output = tmp_path / "store", tmp_path / "out"
    (store / "at/files/adapter").mkdir(parents=True)
    output.mkdir()
    (store / "at/files/adapter/weights.safetensors").write_bytes(bytes(3 * SMALL))
    (store / "at/files/eval.json").write_text("{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
    try:
        with pytest.raises(
            standalone.OutputDiskFull, match=r"^the results could not be written: about 49.2 kB are wanted"
        ):
            standalone._publish(store, "at/manifest.json", output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    standalone._publish(store, "at/manifest.json", output)
    assert (output / "adapter/weights.safetensors").stat().st_size == 3 * SMALL


def test_rows_wait_for_space_and_none_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.begin()
    journal.add({"step": 1, "loss": 2.0})
    path.rename(tmp_path / "aside")
    journal.add({"step": 2, "loss": float("nan")})
    assert not journal.flush()
    (tmp_path / "aside").rename(path)
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # half of it was written
    journal.add({"step": 3, "loss": 1.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0},
    ]  # fmt: skip
