"""The last step is saved before results that take long: neither a drain nor an error in the results loses a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.crews import Crew
from tests.trainer.support.workers import Worker
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.core.errors import Drained
from trainer.core.ipc import RunFolder, SnapshotInfo, info_of
from trainer.training import evaluation as evaluate

FULL, LORA = (tiny_jobs.KINDS[f"causal_lm {method}"] for method in ("full", "lora"))
STEPS = tiny_jobs.STEPS
PASSES = 3


def drained_within_a_sample(rank: int) -> None:
    """Drain before the first pass of a sample, because a trained model may end a sample at once."""
    from trainer.training.evaluator import Evaluator

    sampled, look = Evaluator.write_samples, Evaluator._raise_if_draining

    def begun(judge: Evaluator, *given: Any) -> Any:
        passes = []

        def counted(judge: Evaluator) -> None:
            passes.append(1)
            (judge.run.root / "passes").write_text(str(len(passes)))
            if len(passes) == 1:
                judge.run.drain.touch()
            look(judge)

        Evaluator._raise_if_draining = counted  # type: ignore[method-assign]
        return sampled(judge, *given)

    Evaluator.write_samples = begun  # type: ignore[method-assign]


def drained_before_the_merge(rank: int) -> None:
    from trainer.tasks.common.task_model import TaskModel
    from trainer.training.evaluator import Evaluator

    write = Evaluator.write

    def asked(judge: Evaluator, *given: Any, **more: Any) -> None:
        judge.run.drain.touch()
        write(judge, *given, **more)

    def merge(model: TaskModel[Any], folder: Path, rows: Any) -> None:
        raise AssertionError("it went on")

    Evaluator.write, TaskModel.merge = asked, merge  # type: ignore[method-assign]


def no_merge(rank: int) -> None:
    from trainer.tasks.common.task_model import TaskModel

    def merge(model: TaskModel[Any], folder: Path, rows: Any) -> None:
        raise RuntimeError("shapes cannot be merged")

    TaskModel.merge = merge  # type: ignore[method-assign]


def left(run: RunFolder) -> list[tuple[int, bool]]:
    """Return (step, has results) of each snapshot."""
    found = [SnapshotInfo.model_validate_json(info_of(path).read_bytes()) for path in run.waiting()]
    return [(info.step, info.complete) for info in found]


class Place:
    """Job that makes no save before the one that precedes the results."""

    def __init__(self, folder: Path, kind: Any, **changes: Any) -> None:
        self.folder, self.data = folder, folder / "rows.csv"
        self.data.write_bytes(tiny_jobs.data(kind))
        made = tiny_jobs.train(kind, folder / "model").model_dump()
        self.train = TrainConfig.model_validate({**made, "samples": {"prompts": ["w1 w2"]}, **changes})

    def worker(self, name: str, harm: Callable[[int], None] | None = None, **more: Any) -> Worker:
        worker = Worker(self.folder / name, self.train, self.data, **more)
        text = worker.run.job.read_text().replace('"save_every_s":0.0', '"save_every_s":3600.0')
        assert "3600.0" in text
        worker.run.job.write_text(text)
        return worker.start(harm)


def test_a_drain_within_a_sample_loses_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, FULL)
    drained = place.worker("drained", drained_within_a_sample)
    assert drained.end().code == ExitCode.DRAINED
    assert (drained.run.root / "passes").read_text() == "1"
    assert left(drained.run) == [(STEPS, False)]

    again = place.worker("again", restore=drained.last)
    assert again.end().code == ExitCode.COMPLETED
    assert left(again.run) == [(STEPS, True)], "it only writes the results"
    assert workers.story(again.last) == workers.story(drained.last)
    assert (again.last / "eval.json").exists()


def test_all_processes_leave_the_sampling_together(tmp_path: Path) -> None:
    place = Place(tmp_path, FULL, max_steps=2)
    crew = Crew(tmp_path / "crew", place.train, place.data, each=2, harm=drained_within_a_sample)
    (ended,) = crew.start().ends()
    assert ended.code == ExitCode.DRAINED, ended.message
    assert left(crew.runs[0])[-1] == (2, False)


@pytest.mark.parametrize(
    ("harm", "code"), [(drained_before_the_merge, ExitCode.DRAINED), (no_merge, ExitCode.INFRASTRUCTURE)]
)
def test_a_failed_merge_loses_nothing(harm: Any, code: ExitCode, tmp_path: Path) -> None:
    worker = Place(tmp_path, LORA, output={"merge": True}).worker("run", harm)
    ended = worker.end()
    assert ended.code == code, ended.message
    assert left(worker.run) == [(STEPS, False)]


class Adapted(torch.nn.Module):
    """Model that calls its inner module directly, as methods of adapters do, or through itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()

    def get_base_model(self) -> torch.nn.Module:
        return self.inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(x)  # type: ignore[no-any-return]


def test_each_pass_is_watched_also_of_the_model_within_adapters() -> None:
    model, x, passes = Adapted(), torch.zeros(1), [0]

    def between() -> None:
        passes[0] += 1
        if passes[0] == PASSES:
            raise Drained

    def passing() -> None:
        with evaluate.watched(model, between):
            model(x)
            model.inner(x)
            model(x)

    with pytest.raises(Drained):
        passing()
    assert passes == [PASSES]
    model.inner(model(x))
    assert passes == [PASSES], "and no longer"
