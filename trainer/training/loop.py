"""Training loop: from a job to a tuned model, resumable at every micro-batch, bit by bit."""

import contextlib
import functools
import json
import math
import shutil
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.checkpoint_format import METRICS
from trainer.core.errors import Drained
from trainer.core.ipc import RunFolder, WorkerJob, replace
from trainer.models import loading as model
from trainer.parallel import barrier as meeting
from trainer.training import (
    divergence as guard,
)
from trainer.training import (
    memory_breakdown as breakdown,
)
from trainer.training import (
    model_selection as selection,
)
from trainer.training import (
    result_writer as results,
)
from trainer.training import (
    tensorboard as board,
)
from trainer.training.checkpointing import CheckpointManager
from trainer.training.evaluator import Evaluator
from trainer.training.step import Steps

RATE_STEPS = 20


class Loop(Steps):
    """Fine-tune on this process's device, in step with the other processes."""

    def __init__(self, job: WorkerJob, run: RunFolder) -> None:
        super().__init__(job, run)
        self._selection = selection.Selection(job.train.selection, job.job)
        common: dict[str, Any] = {
            "accelerator": self._accelerator,
            "arrangement": self._parallel,
            "model": self._bare,
            "parameters": self._parameters,
            "report": self._report,
        }
        trained = {"tokenizer": self._task.data.tokenizer, "optimizer": self._optimizer, "selection": self._selection}
        self._keeper = CheckpointManager(job, run, **trained, **common)
        self._judge = Evaluator(job=job, run=run, task=self._task, held=self._held, rows=self._micro * 2, **common)
        self._board = board.Board(run.root / board.FOLDER, self._report.event)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RATE_STEPS)
        self._report_start()

    def _report_start(self) -> None:
        count = sum(p.numel() for p in self._parameters.values())
        self._report.say(
            f"{self._config.model}: {count:,} of {sum(map(model.size, self._bare.parameters())):,} weights are "
            f"trained on {self._parallel.describe()}; {len(self._train)} rows, "
            f"{len(self._held)} held out, {self._total} steps of {self._config.rows_a_step}"
        )
        if self._dropped:
            self._report.say(f"{self._dropped} rows dropped: no target within max_length {self._config.max_length}")

    def run(self) -> None:
        """Train to the end and leave the complete snapshot. Raises: Drained, after saving, when asked to stop."""
        self._check_determinism()
        self._restore()
        self._keeper.start()
        try:
            self._before()
            self._bare.train()
            begun = self._progress.step
            while self._goes_on():
                self._step()
                if self._job.probe and self._progress.step == begun + 1:
                    self._probe()
                self._after_step()
            self._finish(begun)
        except Drained:
            if self._progress.step or self._progress.micro_batch_index:
                self._set(phase="draining", message="saving before the end")
                self._save_last()
            raise
        except guard.Rollback:
            self._keeper.snapshots.join()
            raise

    def _save_last(self) -> None:
        """Save a last checkpoint. No process waits for a message of another, which may be about to end."""
        if self._parallel.world == 1 and self._keeper.has(self._progress):
            return
        self._keeper.save(self._progress, last=True)
        self._keeper.snapshots.join()
        self._keeper.report_save_failure()

    def memory(self) -> str:
        """Return one line on what occupies the memory."""
        peak = self._report.peak()
        return breakdown.told(self._bare, self._optimizer, peak=peak, expected=self._job.memory)

    def _goes_on(self) -> bool:
        """Evaluate before the next step and return True if training continues.

        An evaluation after the last step would be lost in a stop between them.
        """
        if self._progress.step >= self._total:
            return False
        self._evaluate_if_due()
        if why := selection.early_stop_reason(self._config.selection, self._progress.scores):
            self._report.event("early_stop", why)
        return not why

    def _after_step(self) -> None:
        step = self._progress.step
        self._keeper.snapshots.check()
        self._report.flush()
        due = self._keeper.is_due()
        drain, save = self._parallel.any_rank(self._run.drain.exists(), due and self._accelerator.is_main_process)
        if drain:
            raise Drained
        if save and step < self._total:
            self._keeper.save(self._progress)

    def _evaluate_if_due(self) -> None:
        step, every = self._progress.step, self._config.eval_every_steps
        if every and self._held and step and step % every == 0 and all(at != step for at, _ in self._progress.heldout):
            self._evaluate()

    def _restore(self) -> None:
        """Resume where the checkpoint ends, or start from the beginning."""
        self._progress = self._keeper.restore(micro_rows=self._micro)
        self._choose_rate()
        if self._progress.step > self._total:
            self._report.say(
                f"notice: max_steps or epochs give {self._total} steps, and {self._progress.step} are done"
            )
        if self._accelerator.is_main_process:
            self._board.begin(self._run.root / METRICS, self._progress.heldout)
            self._tell_heldout()
        if self._job.restore is None:
            return self._set(phase="evaluating", message="", total_steps=self._total)
        return self._set(
            phase="training",
            message="",
            total_steps=self._total,
            heldout_loss_before=self._progress.heldout_loss_before,
            heldout_loss=self._progress.heldout[-1][1] if self._progress.heldout else None,
        )

    def _before(self) -> None:
        """Measure the values before the first step, once in the life of a job."""
        if self._progress.step or self._progress.micro_batch_index:
            return
        if self._held:
            loss, metrics = self._evaluate()
            self._progress = self._progress.model_copy(
                update={"heldout_loss_before": loss, "metrics_before": dict(metrics)}
            )
            self._set(heldout_loss_before=loss)
        if self._config.samples.prompts and self._config.adapters is None:
            kept, alone = self._task.samples.keeps_base_samples, self._parallel.world == 1
            written = self._judge.written(alone=alone) if kept else [""] * len(self._config.samples.prompts)
            self._progress = self._progress.model_copy(update={"base_samples": tuple(written)})

    def _before_update(self) -> None:
        self._keeper.snapshots.before_update()

    def _record(self, row: dict[str, float], tokens: int, seconds: float) -> None:
        step = self._progress.step + 1
        samples = self._progress.samples + self._config.rows_a_step
        self._progress = self._progress.model_copy(
            update={"step": step, "samples": samples, "micro_batch_index": 0, "micro_loss": 0.0}
        )
        self._recent.append((seconds, tokens, self._config.rows_a_step))
        spent = sum(s for s, _, _ in self._recent)
        if self._accelerator.is_main_process:
            whole = {"step": step, **row, "tokens": tokens, "seconds": round(seconds, 4)}
            whole |= {"time": round(time.time(), 3), "attempt": self._job.number}
            self._keeper.journal.add(whole)
            self._board.step(whole)
        self._set(
            phase="training",
            message="",
            loss=row["loss"] if math.isfinite(row["loss"]) else self._report.status.loss,
            tokens_per_s=sum(t for _, t, _ in self._recent) / spent,
            rows_per_s=sum(r for _, _, r in self._recent) / spent,
        )
        self._report.say(
            f"step {step}/{self._total}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{self._report.status.tokens_per_s:.0f} tokens/s  {seconds:.2f} s"
        )

    def _evaluate(self) -> tuple[float, Mapping[str, float]]:
        loss, metrics = self._parallel.first(*self._judge.evaluate(self._progress))
        selection.value(self._config.selection, loss, metrics)
        if self._progress.step:
            self._progress = self._selection.scored(self._progress, loss, metrics, self._parameters)
        heldout = (*(h for h in self._progress.heldout if h[0] != self._progress.step), (self._progress.step, loss))
        self._progress = self._progress.model_copy(update={"heldout": heldout})
        self._set(heldout_loss=loss)
        self._board.heldout(self._progress.step, loss)
        self._tell_heldout()
        told = "".join(f", {name} {value:.4f}" for name, value in metrics.items())
        self._report.say(f"held-out loss after {self._progress.step} steps: {loss:.4f}{told}")
        return loss, metrics

    def _choose_rate(self) -> None:
        """Choose the learning rate that the job leaves to the trainer; the first start of a run fixes it."""
        if not self._rate.source:
            self._progress = self._progress.model_copy(update={"rate": None})
            return
        kept = self._progress.rate
        self._rate = kept or self._rate
        self._progress = self._progress.model_copy(update={"rate": self._rate})
        again = ", as before" if kept else ""
        self._report.event("learning_rate", f"optim.lr auto: {self._rate.lr:.3g}{again} ({self._rate.source})")

    def _tell_heldout(self) -> None:
        """Send the held-out losses to the trackers."""
        if self._accelerator.is_main_process:
            with contextlib.suppress(OSError):  # disk full; the next one contains all
                replace(self._run.heldout, json.dumps(self._progress.heldout))

    def _finish(self, begun: int) -> None:
        """Finish the job; `begun` is the step at which this start began."""
        folder = self._run.root / "artifacts"
        if self._progress.step > begun and self._takes_long() and not self._keeper.has(self._progress):
            self._keeper.save(self._progress)
            self._keeper.snapshots.before_update()  # the results may be made of other weights
        try:
            self._write_results(folder)
        except Drained:
            if self._accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except results.ResultsNotWritten as e:
            if self._keep(folder):
                kept = f"the training itself is saved at step {self._progress.step}, the next attempt only writes them"
                raise results.ResultsNotWritten(f"{e}; {kept}") from None
            raise

    def _takes_long(self) -> bool:
        """Return True if the results may finish much later than the training, or not at all.

        The trained state is then saved first. With held-out rows alone a single process leaves at once when
        asked to.
        """
        config = self._config
        return bool(config.samples.prompts) or config.output.merge or (bool(self._held) and self._parallel.world > 1)

    def _keep(self, unfinished: Path) -> bool:
        """Return True if the trained state is saved, in the disk space that the results leave; all processes enter."""
        if self._accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        if self._keeper.has(self._progress):
            return True
        with meeting.long_barrier("checkpoint"):
            self._keeper.save(self._progress, last=True)
            self._keeper.snapshots.join()
        return self._keeper.has(self._progress)

    def _write_results(self, folder: Path) -> None:
        """Write the results; all processes enter. Raises: ResultsNotWritten, Drained."""
        after, metrics = self._evaluate() if self._held else (None, {})
        self._judge.leave_if_asked()
        settle = functools.partial(self._parallel.settle, self._bare)
        with self._selection.chosen(self._progress, settle, self._parameters) as at:
            if at is not None:
                self._report.event("best", f"the result has the weights of step {at}, which were judged best")
                after, metrics = self._judge.evaluate(self._progress)
            samples = self._judge.write_samples(self._progress, after)
            self._keeper.settle()  # its copy and the results must not be in host memory at once
            self._judge.write(folder, self._progress, self._rate, samples=samples, after=after, metrics=metrics)
        self._judge.insist(
            lambda: self._keeper.finish(self._progress, folder), lambda: self._keeper.checkpoint_bytes(folder)
        )
        if self._accelerator.is_main_process:  # only after all have written their parts: each attempt needs it
            shutil.rmtree(folder, ignore_errors=True)

    def _set(self, **changes: Any) -> None:
        self._report.set(self._progress.step, **changes)
