"""A disk that is full, or a file that may not grow, holds up the saves and not the training; never a half result."""

import json
import resource
from pathlib import Path

from tests.trainer import tiny_jobs, workers
from tests.trainer.harness import until
from tests.trainer.tiny_jobs import KINDS
from tests.trainer.workers import HANGS_S, Harm, Worker
from trainer.contract.rendezvous import ExitCode
from trainer.contract.train import TrainConfig
from trainer.journal import Journal

KIND = KINDS["causal_lm full"]
SMALL = 16 << 10
"""Bytes that a file may have: enough for status and metrics, not for weights."""


def cramped(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))


def cramped_and_patient(rank: int) -> None:
    """It tries until there is room, however late this test makes it."""
    from trainer import results

    cramped(rank)
    results.PAUSES_S = (0.5,) * 2 * HANGS_S  # type: ignore[assignment]


def begun(folder: Path, harm: Harm) -> Worker:
    """A worker that cannot write its weights."""
    data = folder / "rows.csv"
    data.write_bytes(tiny_jobs.data(KIND))
    train = TrainConfig.model_validate({**tiny_jobs.train(KIND, folder / "model").model_dump(), "samples": {}})
    return Worker(folder / "run", train, data).start(harm)


def events(worker: Worker) -> list[str]:
    told = worker.run.told
    return [json.loads(line)[1] for line in told.read_text().splitlines()] if told.exists() else []


def test_training_goes_on_and_the_results_are_written_once_there_is_room(tmp_path: Path) -> None:
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


def test_without_room_it_does_not_succeed(tmp_path: Path) -> None:
    worker = begun(tmp_path, cramped)
    ended = worker.end()
    assert ended.code == ExitCode.INFRASTRUCTURE
    assert "the results could not be written" in ended.message
    assert not worker.run.waiting()
    assert [p.name for p in worker.run.snapshots.iterdir()] == [], "what could not be finished takes no room"


def test_rows_wait_for_room_and_none_is_torn(tmp_path: Path) -> None:
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
