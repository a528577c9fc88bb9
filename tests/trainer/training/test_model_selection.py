"""The reported best step is that of the best weights, even if a run continues with another selection or job."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.tiny_jobs import KINDS
from trainer.contract.checkpoint_format import Progress
from trainer.contract.documents import ExitCode
from trainer.contract.guard import SelectionConfig
from trainer.contract.train import TrainConfig
from trainer.training.model_selection import Selection


def judged(selection: Selection, losses: list[float], progress: Progress | None = None) -> Progress:
    """Return the progress after evaluations; the weights of a step equal its number."""
    progress = progress or Progress()
    for loss in losses:
        progress = progress.model_copy(update={"step": progress.step + 1})
        progress = selection.scored(progress, loss, {}, {"w": torch.tensor([float(progress.step)])})
    return progress


def result(selection: Selection, progress: Progress) -> tuple[int | None, float]:
    """Return (the step that is reported, the step whose weights are in the result)."""
    weights = {"w": torch.tensor([float(progress.step)])}
    with selection.chosen(progress, lambda: None, weights) as at:
        return at, weights["w"].item()


def stored(progress: Progress, kept: float | None) -> Any:
    """Return a checkpoint with the weights of the step `kept` in addition to the last ones."""
    best = {} if kept is None else {"w": torch.tensor([kept])}
    return SimpleNamespace(progress=progress, read=lambda group, name, window: best[name])


WEIGHTS = {"w": torch.tensor([0.0])}


def test_the_least_loss_is_the_best_by_however_little() -> None:
    patient = Selection(SelectionConfig(best=True, min_delta=0.1))
    assert result(patient, judged(patient, [1.0, 0.95, 0.92])) == (None, 3.0)
    patient = Selection(SelectionConfig(best=True, min_delta=0.1))
    assert result(patient, judged(patient, [1.0, 0.95, 0.97])) == (2, 2.0)


def test_lower_min_delta_after_a_restart_keeps_the_best_weights() -> None:
    """`min_delta` is lowered between two starts."""
    first = Selection(SelectionConfig(best=True, min_delta=0.1))
    before = judged(first, [1.0, 0.95, 0.97])
    then = Selection(SelectionConfig(best=True))
    progress = then.restore(stored(before, 2.0), WEIGHTS)
    assert result(then, judged(then, [0.96], progress)) == (2, 2.0)


@pytest.mark.parametrize(
    ("before", "now"),
    [(Selection(SelectionConfig(best=True), "one"), Selection(SelectionConfig(best=True), "two")),
     (Selection(SelectionConfig(best=True), "one"), Selection(SelectionConfig(best=True, metric="mae"), "one")),
     (Selection(SelectionConfig(), "one"), Selection(SelectionConfig(best=True), "one"))],
    ids=["another job", "another metric", "none were kept"],
)  # fmt: skip
def test_scores_that_tell_nothing_here_begin_again(before: Selection, now: Selection) -> None:
    progress = now.restore(stored(judged(before, [0.1, 0.2]), 1.0 if before.config.best else None), WEIGHTS)
    assert (progress.scores, progress.best) == ((), None)


def test_a_job_with_the_best_continues_from_one_without(tmp_path: Path) -> None:
    """The first job did not store its best weights."""
    kind, data = KINDS["causal_lm lora"], tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    plain = tiny_jobs.train(kind, tmp_path / "model").model_copy(update={"max_steps": 5})
    more = {"max_steps": 9, "selection": {"best": True}}
    best = TrainConfig.model_validate({**plain.model_dump(), **more})
    origin = workers.finished(tmp_path / "origin", plain, data)
    before = json.loads((origin / "state.json").read_text())
    (origin / "state.json").write_text(json.dumps(before | {"scores": [[5, 0.1]]}))  # it will not be as good again
    heir = workers.Worker(tmp_path / "heir", best, data, restore=origin).start()
    ended = heir.end()
    assert ended.code == ExitCode.COMPLETED, ended.message
    state = json.loads((heir.last / "state.json").read_text())
    step, least = min(state["scores"], key=lambda score: score[1])
    assert (state["best"]["step"], step > 5) == (step, True)
    assert json.loads((heir.last / "eval.json").read_text())["heldout_loss_after"] == pytest.approx(least, rel=1e-6)
