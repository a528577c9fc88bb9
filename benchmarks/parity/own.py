"""Steps of this trainer in this process, with the tokens, the masks and the loss of each step."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.batching.examples import IGNORED, Example
from trainer.contract.checkpoint_format import Progress
from trainer.contract.train import TrainConfig
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.tasks.common.packing import Pack
from trainer.tasks.text.kto import RatedAnswer
from trainer.tasks.text.preference_pairs import Preference
from trainer.tasks.text.seq2seq import Pair
from trainer.tasks.text.token_classification import Tagged
from trainer.training import divergence, setup
from trainer.training.setup import TrainingSetup
from trainer.training.step import CompletedStep, SampledBatches, StepRunner

Row = tuple[list[int], list[bool]]
"""Token ids, and whether each token carries loss."""


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """Training that is built and has made no step."""

    setup: TrainingSetup

    def order(self) -> list[int]:
        """Return the indices of the rows in the order of all steps, by micro-batch, as they are computed."""
        config, rows = self.setup.config, self.setup.train_rows
        numbers: list[int] = []
        for step in range(self.setup.total_steps):
            batches = self._batches().at(step * config.global_batch_rows)
            chosen = [example for micro in batches.micro_batches for example in micro]
            free = set(range(len(rows)))
            for example in (row for e in chosen for row in (e.rows if isinstance(e, Pack) else (e,))):
                number = next(n for n in sorted(free) if rows[n] == example)
                free.discard(number)
                numbers.append(number)
        return numbers

    def rows(self) -> list[list[Row]]:
        """Return the sequences of each training row: one, or two for a preference."""
        return [_sequences(example) for example in self.setup.train_rows]

    def losses(self) -> list[float]:
        """Train all steps and return their losses."""
        progress, found, runner = Progress(), [], self._runner()
        while progress.step < self.setup.total_steps:
            done = runner.run(progress)
            assert isinstance(done, CompletedStep)
            progress = done.progress
            found.append(done.row["loss"])
        return found

    def _batches(self) -> SampledBatches:
        built = self.setup
        return SampledBatches(
            task=built.task, config=built.config, rows=built.train_rows, micro_rows=built.micro_rows,
            total_steps=built.total_steps, arrangement=built.trained.arrangement,
        )  # fmt: skip

    def _runner(self) -> StepRunner:
        built = self.setup
        return StepRunner(
            trained=built.trained, task=built.task, config=built.config, rate=built.rate,
            total_steps=built.total_steps, micro_rows=built.micro_rows, batches=self._batches(),
            judge=lambda progress, loss, norm: divergence.check_step(built.config.guard, progress, loss, norm),
            before_update=lambda: None, stop_requested=lambda: False,
        )  # fmt: skip


def build(train: TrainConfig, data: Path, data_format: str) -> OwnRun:
    """Read the rows and the model as a worker does."""
    run = RunFolder(root=Path(tempfile.mkdtemp(dir=data.parent)))
    run.make()
    job = WorkerJob(train=train, data=str(data), data_format=data_format, number=1, save_every_s=600)
    return OwnRun(setup=setup.build(job, run))


def _sequences(example: Any) -> list[Row]:
    """Return tokens and loss mask of each sequence of an example; a whole text's label is not among its tokens."""
    if isinstance(example, Preference):
        return [_row(example.chosen), _row(example.rejected)]
    if isinstance(example, RatedAnswer):
        return [_row(example.answer)]
    if isinstance(example, Pair):
        return [(list(example.ids), []), (list(example.labels), [True] * len(example.labels))]
    return [_row(example)]


def _row(part: Any) -> Row:
    ids = list(getattr(part, "ids", []))
    if isinstance(part, Example):
        return ids, [False, *(label != IGNORED for label in part.labels[1:])]  # No token precedes the first one.
    return ids, [label != IGNORED for label in part.labels] if isinstance(part, Tagged) else []
