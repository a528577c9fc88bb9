"""Bad steps are skipped, rolled back, or fail the job, in the same way in every run of the job."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.harness import Bench
from tests.trainer.support.tiny_jobs import KINDS, POISONED
from trainer.batching import sampler as order
from trainer.contract.checkpoint_format import GuardState, Progress, RowSkip, has_due_row_skips
from trainer.contract.documents import ExitCode, Outcome
from trainer.contract.guard import GuardConfig, SelectionConfig
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.training import divergence as guard
from trainer.training import model_selection as selection
from trainer.training.result_writer import ResultsNotWritten

NAN = math.nan
KIND = KINDS["text_regression full"]


def step_verdicts(config: GuardConfig, losses: list[float]) -> list[tuple[str, str]]:
    """Return (verdict, message to the user) of each step up to the first one that the run cannot continue from."""
    progress = Progress()
    found: list[tuple[str, str]] = []
    for loss in losses:
        verdict, care, words = guard.check_step(config, progress, loss, 1.0)
        found.append((verdict, words))
        progress = progress.model_copy(update={"guard": care, "step": progress.step + 1})
        if verdict in ("back", "stop"):
            break
    return found


def verdicts(config: GuardConfig, losses: list[float]) -> list[str]:
    return [verdict for verdict, _ in step_verdicts(config, losses)]


def test_bad_steps_are_skipped_then_rolled_back_then_fail_the_job() -> None:
    config = GuardConfig(skip=2, rollbacks=1)
    assert verdicts(config, [1.0, NAN, math.inf, 1.0]) == ["go", "skip", "skip", "go"]
    assert verdicts(config, [NAN, NAN, 1.0, NAN, NAN, NAN]) == ["skip", "skip", "go", "skip", "skip", "back"]
    assert verdicts(GuardConfig(skip=1, rollbacks=0), [NAN, NAN]) == ["skip", "stop"]
    words = step_verdicts(GuardConfig(skip=0, rollbacks=0), [NAN])[0][1]
    assert "step 1: the loss is not a finite number" in words
    assert "lower train.optim.lr" in words


def test_a_non_finite_norm_counts_as_a_non_finite_loss() -> None:
    assert guard.check_step(GuardConfig(), Progress(), 1.0, NAN)[0] == "skip"


def test_a_rollback_goes_before_the_first_bad_step_and_skips_its_rows() -> None:
    config = GuardConfig(skip=2, back_steps=10)
    bad = Progress(step=52, samples=520, guard=GuardState(bad_steps=2))
    jumps = guard.rollback_plan(config, bad, 10)
    assert jumps == (RowSkip(step=40, samples=530),)
    assert (
        guard.rollback_plan(config, bad.model_copy(update={"step": 7, "guard": GuardState(bad_steps=2)}), 10)[0].step
        == 0
    )

    at = guard.skip_rows(Progress(step=40, samples=400, micro_batch_index=3), jumps)
    assert (at.samples, at.micro_batch_index, at.guard.row_skips) == (530, 0, jumps)
    assert guard.skip_rows(at, jumps) == at
    assert guard.skip_rows(Progress(step=39, samples=390), jumps).samples == 390


def test_an_outlying_loss_is_reported_once_and_changes_nothing() -> None:
    draw = random.Random(1)
    noise = [2.0 + draw.uniform(-0.2, 0.2) for _ in range(60)]
    calm = step_verdicts(GuardConfig(), noise)
    assert {words for _, words in calm} == {""}
    strange = step_verdicts(GuardConfig(), [*noise, 9.0, 9.0, *noise])
    heard = [words for _, words in strange if words]
    assert len(heard) == 1
    assert heard[0].startswith("step 61: loss 9 where the median of 60 steps is 1.98")
    assert {verdict for verdict, _ in strange} == {"go"}


def test_evaluations_end_the_training_when_they_get_no_better() -> None:
    config = SelectionConfig(patience=2, min_delta=0.1)
    assert not selection.early_stop_reason(config, ((4, 3.0), (8, 2.0), (12, 1.95)))
    assert "loss 2.0000 after step 8" in selection.early_stop_reason(
        config, ((4, 3.0), (8, 2.0), (12, 1.95), (16, 2.5))
    )
    assert not selection.early_stop_reason(config, ((4, 3.0), (8, 2.0), (12, 1.95), (16, 1.8)))
    high = SelectionConfig(metric="accuracy", patience=1)
    assert selection.best(high, ((4, 0.1), (8, 0.3), (12, 0.2))) == (8, 0.3)
    assert selection.best(SelectionConfig(), ((4, NAN), (8, 7.0), (12, NAN))) == (8, 7.0)
    with pytest.raises(UserFault, match="no 'f1' here; the task has accuracy, loss"):
        selection.value(SelectionConfig(metric="f1"), 1.0, {"accuracy": 0.5})


def test_a_selection_without_evaluations_is_refused(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": "m", "data": {"path": "x.csv", "completion": "{a}"}}
    with pytest.raises(ValueError, match="set eval_every_steps"):
        TrainConfig.model_validate({**fields, "selection": {"patience": 1}})


def test_the_last_weights_are_restored_even_if_the_results_fail() -> None:
    """The last weights are saved then, together with the last moments."""
    weights = {"w": torch.tensor([1.0])}
    chosen = selection.Selection(SelectionConfig(best=True))
    progress = chosen.scored(Progress(step=1), 2.0, {}, weights)
    weights["w"].fill_(5.0)
    progress = chosen.scored(progress.model_copy(update={"step": 2}), 3.0, {}, weights)

    def written() -> None:
        with chosen.chosen(progress, lambda: None, weights) as at:
            assert (at, weights["w"].item()) == (1, 1.0)
            raise ResultsNotWritten("the disk is full")

    with pytest.raises(ResultsNotWritten):
        written()
    assert weights["w"].item() == 5.0


# ------------------------------------------------------------------------------------------------------ whole trainings


def train(folder: Path, **more: Any) -> TrainConfig:
    made = tiny_jobs.train(KIND, folder / "model")
    return TrainConfig.model_validate({**made.model_dump(), **more})


def data(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_bytes(tiny_jobs.data(KIND))
    return path


def poisoned_steps() -> list[int]:
    """Return steps, from 1, whose rows hold the one that cannot be squared."""
    training, _ = order.split(17, tiny_jobs.ROWS, 1 - tiny_jobs.TRAINED / tiny_jobs.ROWS)
    place, batch = training.index(POISONED), tiny_jobs.GLOBAL_BATCH
    return [s + 1 for s in range(tiny_jobs.STEPS) if place in order.step_rows(17, s * batch, batch, len(training))]


def test_poisoned_steps_are_left_out_and_the_best_weights_are_the_result(tmp_path: Path) -> None:
    done = workers.finished(tmp_path / "run", train(tmp_path), data(tmp_path))
    rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["loss"] is None] == poisoned_steps() != []
    scores = json.loads((done / "state.json").read_text())["scores"]
    step, least = min(scores, key=lambda score: score[1])
    assert json.loads((done / "eval.json").read_text())["metrics_after"]["mae"] == least
    if step < tiny_jobs.STEPS:
        kept, last = (done / f"{name}.safetensors" for name in ("best", "model"))
        assert kept.read_bytes() != last.read_bytes()
    events = [json.loads(line) for line in (tmp_path / "run" / "messages.jsonl").read_text().splitlines()]
    assert [kind for kind, _ in events].count("skipped") == len(poisoned_steps())


def test_early_stopping_is_reported(tmp_path: Path) -> None:
    lazy = {"metric": "loss", "patience": 1, "min_delta": 1e9}
    done = workers.finished(tmp_path / "run", train(tmp_path, selection=lazy), data(tmp_path))
    assert json.loads((done / "state.json").read_text())["step"] == 2 * tiny_jobs.EVAL_EVERY
    assert "stopped early: 1 evaluations" in (tmp_path / "run" / "messages.jsonl").read_text()


def test_a_job_that_cannot_be_saved_from_its_data_fails_by_its_own_fault(tmp_path: Path) -> None:
    strict = train(tmp_path, guard={"skip": 0, "rollbacks": 0})
    ended = workers.Worker(tmp_path / "run", strict, data(tmp_path)).start().end()
    assert ended.code == ExitCode.USER_ERROR
    assert f"step {poisoned_steps()[0]}: the loss is not a finite number" in ended.message


def restart_until_done(folder: Path, train: TrainConfig, data: Path, *, stored: bool) -> tuple[list[int], Path]:
    """Restart workers as an agent does; return the steps that they went back to, and the last snapshot.

    `stored`: restart from the newest checkpoint that the workers left; otherwise from the beginning.
    """
    jumps: tuple[RowSkip, ...] = ()
    left: list[Path] = []
    for number in range(20):
        restore = max((s for s in left if has_due_row_skips(s, jumps)), default=None) if stored and jumps else None
        worker = workers.Worker(folder / str(number), train, data, restore=restore, jumps=jumps).start()
        ended = worker.end()
        if ended.code != ExitCode.BACK:
            assert ended.code == ExitCode.COMPLETED, ended.message
            return [jump.step for jump in jumps], worker.last
        jumps = ended.jumps
        left = [s for s in [*left, *worker.run.waiting()] if int(s.name[:10]) <= jumps[-1].step]
    raise AssertionError("it goes back again and again")


def test_going_back_is_the_same_whichever_checkpoints_there_are(tmp_path: Path) -> None:
    wary, rows = train(tmp_path, guard={"skip": 0, "rollbacks": 10, "back_steps": 1}, max_steps=5), data(tmp_path)
    back, stored = restart_until_done(tmp_path / "stored", wary, rows, stored=True)
    again, fresh = restart_until_done(tmp_path / "fresh", wary, rows, stored=False)
    assert len(back) > 1
    assert back == again
    assert workers.story(stored) == workers.story(fresh)
    assert all(loss is not None for _, loss, *_ in workers.story(stored)[0])


def test_an_agent_starts_the_worker_again_and_says_what_happened(bench: Bench, tmp_path: Path) -> None:
    wary = train(tmp_path, guard={"skip": 0, "rollbacks": 4, "back_steps": 1}, max_steps=3, eval_every_steps=2)
    agent = bench.start(train=wary, data=bench.data(tiny_jobs.data(KIND), "csv"), checkpoint={"every_s": 1})
    assert agent.wait().outcome is Outcome.COMPLETED, agent.log
    assert {"rolled_back", "left_out"} <= {message.kind for message in agent.final.messages}, agent.final.messages
    assert [row["step"] for row in bench.metrics(bench.committed()[0][0])] == [1, 2, 3]
