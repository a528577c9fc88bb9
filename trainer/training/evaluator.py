"""Evaluates the weights and writes the results of a job."""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from trainer.batching import sampler
from trainer.contract.checkpoint_format import METRICS, Progress, Rate
from trainer.core.errors import Drained, Fault
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.parallel import barrier, ddp
from trainer.tasks.common.task import Task
from trainer.training import (
    determinism,
    evaluation,
    model_card,
    result_writer,
    tensorboard,
)
from trainer.training.reporter import Reporter

EVALUATION = 2**31
"""Step number in the seeds of evaluations, so that all evaluations draw the same numbers."""
COMPARED_ROWS, COMPARED_TOKENS = 4, 512
"""Rows, and the most tokens of each, that compare a merged model with base and adapter."""
NOT_A_SAMPLE_ERROR = (Fault, Drained, MemoryError, OSError, torch.cuda.OutOfMemoryError)
"""Errors that are not caused by the samples."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluator of one process; all processes enter its methods."""

    job: WorkerJob
    run: RunFolder
    task: Task[Any]
    model: Any
    """Model as the task created it."""
    parameters: dict[str, Any]
    held: Sequence[Any]
    """Held-out rows."""
    rows: int
    """Rows of an evaluation batch."""
    accelerator: Accelerator
    arrangement: ddp.DataParallel
    report: Reporter

    def evaluate(self, progress: Progress) -> tuple[float, Mapping[str, float]]:
        """Return (loss, metrics) of the current weights."""
        self.report.set(progress.step, phase="evaluating", message=f"loss on {len(self.held)} held-out rows")

        def between() -> None:
            if self.arrangement.world == 1:
                self._raise_if_draining()

        self.task.data.begin_step(EVALUATION)
        set_seed(sampler.micro_batch_seed(self.job.train.seed, EVALUATION, 0))
        return evaluation.heldout(
            self.task, self.model, self.held, size=self.rows, device=self.accelerator.device, between=between
        )

    def _raise_if_draining(self) -> None:
        """Check for a stop request in this process alone. Raises: Drained."""
        if self.run.drain.exists():
            raise Drained

    def leave_if_asked(self) -> None:
        """Check for a stop request; all processes enter. Raises: Drained for all."""
        if self.arrangement.any_rank(self.run.drain.exists())[0]:
            raise Drained

    def write_samples(self, progress: Progress, after: float | None) -> list[dict[str, str]]:
        """Return samples of the current weights if this process writes any; all processes enter.

        `after`: the held-out loss of these weights.

        Raises: Drained.
        """
        self.report.set(progress.step, phase="sampling", message="writing samples", heldout_loss_after=after)
        samples: list[dict[str, str]] = []
        with barrier.long_barrier("samples"), contextlib.suppress(Drained):  # the next check raises it in all processes
            samples = self._samples(progress)
        self.leave_if_asked()
        return samples

    def write(
        self,
        folder: Path,
        progress: Progress,
        rate: Rate,
        *,
        samples: list[dict[str, str]],
        after: float | None,
        metrics: Mapping[str, float],
    ) -> None:
        """Write the results of the current weights into a folder; all processes enter. Raises: Fault, Drained."""
        scores: dict[str, Any] = {
            "heldout_loss_before": progress.heldout_loss_before,
            "heldout_loss_after": after,
            "rows": len(self.held),
            "history": [{"step": s, "loss": x} for s, x in progress.heldout],
        }
        if metrics:
            scores |= {"metrics_before": progress.metrics_before, "metrics_after": dict(metrics)}
        self.report.set(progress.step, phase="saving", message="saving the results")
        lora = self.job.train.adapters is not None
        full_weights = self.arrangement.whole(self.model, self.parameters if lora else None)

        def write() -> None:
            if self.accelerator.is_main_process:
                evaluation.write_artifacts(folder, self.task, self.model, full_weights, samples, scores)
                rows, made_on = self.run.root / METRICS, self.arrangement.describe()
                text = model_card.text(self.job, metrics=rows, scores=scores, made_on=made_on, rate=rate)
                (folder / "README.md").write_text(text)
                tensorboard.write(folder, rows, progress.heldout, self.report.event)

        def merge() -> None:
            if self.accelerator.is_main_process:
                shutil.rmtree(folder / "model", ignore_errors=True)  # left by an earlier attempt
                compared = self.task.model.merge(folder, self._compared_rows())
                if compared:
                    (folder / "eval.json").write_text(json.dumps(scores | {"merge": dict(compared)}, indent=1))

        self.retry_together(lambda: result_writer.try_write(write), lambda: self._result_bytes(full_weights))
        if self.job.train.output.merge:
            self.leave_if_asked()
            self.retry_together(lambda: result_writer.try_write(merge), lambda: self._result_bytes(full_weights))

    def _compared_rows(self) -> list[Any]:
        """Return the shortest held-out rows, on which the merged model is compared in host memory."""
        size = self.task.data.size
        rows = sorted(self.held, key=size)[:COMPARED_ROWS]
        return [row for row in rows if size(row) <= COMPARED_TOKENS]

    def _result_bytes(self, full_weights: Mapping[str, torch.Tensor] | None) -> int:
        """Return the bytes of the weights in the results."""
        output = self.job.train.output
        trained = full_weights if full_weights is not None else self.parameters
        merged = self.model.parameters() if output.merge else ()
        return sum(t.numel() * t.element_size() for t in (*trained.values(), *merged))

    def retry_together(self, action: Callable[[], str], needed_bytes: Callable[[], int]) -> None:
        """Repeat an action of all processes until it succeeds in all; it may exceed the timeout of a collective.

        `needed_bytes`: returns the bytes that the files need.

        Raises: ResultsNotWritten, Drained.
        """

        def together() -> str:
            with barrier.long_barrier("results"):
                return action()

        result_writer.write_with_retries(
            together,
            agree=lambda fact: self.arrangement.any_rank(fact)[0],
            waiting=lambda: bool(self.run.waiting()),
            leave=self.leave_if_asked,
            report=self.report.event,
            folder=self.run.root,
            needed_bytes=needed_bytes,
        )

    def _samples(self, progress: Progress) -> list[dict[str, str]]:
        """Return samples; all processes write them if none has the whole model."""
        if not self.job.train.samples.prompts or not (self.accelerator.is_main_process or self.arrangement.divided):
            return []
        alone = not self.arrangement.divided
        tuned = self.generate_samples(alone=alone)
        if progress.base_samples is not None:
            base = list(progress.base_samples)
        else:
            with evaluation.without_adapter(self.model):
                base = self.generate_samples(alone=alone)
        prompts = self.job.train.samples.prompts
        return [{"prompt": p, "base": b, "tuned": t} for p, b, t in zip(prompts, base, tuned, strict=True)]

    def generate_samples(self, *, alone: bool) -> list[str]:
        """Return the text or picture that the current weights generate for each prompt; empty texts on failure.

        A failure does not end the training. `alone`: True if no other process runs in step with this one, so that this
        process may leave at any time.

        Raises: Drained if `alone`.
        """
        watched = evaluation.watched(self.model, self._raise_if_draining) if alone else contextlib.nullcontext()
        try:
            with watched, determinism.leniently(), evaluation.as_trained(self.job.train, self.accelerator):
                return self.task.samples.write(self.model, self.accelerator.device)
        except Exception as e:
            if self.arrangement.divided or isinstance(
                e, NOT_A_SAMPLE_ERROR
            ):  # the other processes of a divided model wait for this one
                raise
            problem = (str(e).strip().splitlines() or ["no message"])[0][:300]
            self.report.event("no_samples", f"the samples could not be written ({type(e).__name__}: {problem})")
            return [""] * len(self.job.train.samples.prompts)
