"""Processes wait for work of unequal length in another process as long as that process is alive."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import tiny_jobs
from tests.trainer.support.crews import Crew
from trainer.contract.documents import ExitCode, Parallelism

KIND = tiny_jobs.KINDS["causal_lm full"]
TIMEOUT_S = 15.0
SILENT_S = 6.0


def late(rank: int) -> None:
    """Delay the second process by longer than a collective's timeout, at its start and in its rows. Delay the first
    process in its weights and its results."""
    from trainer.parallel import ddp as parallel
    from trainer.tasks.common.task import Task
    from trainer.tasks.common.task_model import TaskModel
    from trainer.training import evaluation as evaluate

    parallel.TIMEOUT = timedelta(seconds=TIMEOUT_S)
    examples, build, write = Task.examples, TaskModel.build, evaluate.write_artifacts

    def slow_examples(task: Task[Any], *given: Any, **more: Any) -> Any:
        time.sleep(1.5 * TIMEOUT_S * rank)
        return examples(task, *given, **more)

    def slow_build(model: TaskModel[Any], *given: Any, **more: Any) -> Any:
        time.sleep(1.5 * TIMEOUT_S * (1 - rank))
        return build(model, *given, **more)

    def slow_results(*given: Any) -> None:
        time.sleep(1.5 * TIMEOUT_S)
        write(*given)

    Task.examples, TaskModel.build = slow_examples, slow_build  # type: ignore[method-assign]
    evaluate.write_artifacts = slow_results
    time.sleep(1.5 * TIMEOUT_S * rank)


def dies(rank: int) -> None:
    """End the second process without an error while the first one waits for its rows."""
    from trainer.parallel import barrier as meeting
    from trainer.tasks.common.task import Task

    meeting.SILENT_S = SILENT_S
    examples = Task.examples

    def killed(task: Task[Any], *given: Any, **more: Any) -> Any:
        if rank:
            time.sleep(SILENT_S / 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return examples(task, *given, **more)

    Task.examples = killed  # type: ignore[method-assign]


def fails(rank: int) -> None:
    """Fail in the second process with an error."""
    from trainer.tasks.common.task import Task

    examples = Task.examples

    def failing(task: Task[Any], *given: Any, **more: Any) -> Any:
        if rank:
            raise MemoryError
        return examples(task, *given, **more)

    Task.examples = failing  # type: ignore[method-assign]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_bytes(tiny_jobs.data(KIND))
    return path


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_machines_wait_for_the_one_that_takes_longest(kind: Any, data: Path, tmp_path: Path) -> None:
    train = tiny_jobs.train(KIND, tmp_path / "model").model_copy(update={"max_steps": 1})
    how = Parallelism(kind=kind)
    Crew(tmp_path / "crew", train, data, each=1, nodes=2, how=how, harm=late).done()


def test_a_machine_that_dies_meanwhile_is_not_waited_for(data: Path, tmp_path: Path) -> None:
    crew = Crew(tmp_path / "crew", tiny_jobs.train(KIND, tmp_path / "model"), data, each=1, nodes=2, harm=dies)
    crew.start().processes[0].join(120)
    ended = crew.runs[0].ended.read_text()
    assert f'"code":{int(ExitCode.INFRASTRUCTURE)}' in ended
    assert '"failed_by_peer":true' in ended
    assert "process 1, which prepares its rows, sent its last heartbeat" in ended


def test_a_machine_that_fails_meanwhile_ends_the_others_at_once(data: Path, tmp_path: Path) -> None:
    crew = Crew(tmp_path / "crew", tiny_jobs.train(KIND, tmp_path / "model"), data, each=1, nodes=2, harm=fails)
    ends = crew.start().ends()
    assert [(one.code, one.failed_by_peer) for one in ends] == [(ExitCode.INFRASTRUCTURE, True), (ExitCode.OOM, False)]
    assert ends[0].message == "another process of this job has gone: process 1 failed while preparing its rows"
