"""Training loop: from a job to a tuned model, resumable after every micro-batch with the same bits."""

import contextlib
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.batching import mmap_dataset
from trainer.contract.checkpoint_format import Progress, Rate
from trainer.core.errors import Drained, UserFault
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.models import loading
from trainer.parallel import barrier
from trainer.training import determinism, divergence, model_selection, result_writer, setup
from trainer.training.checkpointing import CheckpointManager, CheckpointSources
from trainer.training.evaluator import Evaluator
from trainer.training.metrics_log import RunMetrics
from trainer.training.reporter import memory_line
from trainer.training.step import CompletedStep, DivergedStep, InterruptedStep, SampledBatches, StepRunner


class TrainingLoop:
    """Fine-tuning on this process's device, in step with the other processes.

    It decides when to step, evaluate, save and stop; its `StepRunner` computes the steps.
    """

    def __init__(self, job: WorkerJob, run: RunFolder) -> None:
        self._job, self._run, self._config = job, run, job.train
        self._setup = setup.build(job, run)
        self._task, self._report, self._trained = self._setup.task, self._setup.report, self._setup.trained
        self._accelerator, self._arrangement = self._trained.accelerator, self._trained.arrangement
        self._progress = Progress()
        self._selection = model_selection.Selection(self._config.selection, job.job)
        self._checkpoints = CheckpointManager(
            CheckpointSources(
                job=job,
                run=run,
                trained=self._trained,
                tokenizer=self._task.data.tokenizer,
                selection=self._selection,
                report=self._report,
            )
        )
        self._evaluator = self._new_evaluator()
        self._metrics = RunMetrics(self._setup, self._checkpoints.journal)
        self._batches = self._sampled_batches()
        self._runner = self._step_runner()
        self._report_start()

    def _new_evaluator(self) -> Evaluator:
        return Evaluator(
            job=self._job,
            run=self._run,
            task=self._task,
            model=self._trained.bare,
            parameters=self._trained.parameters,
            held=self._setup.heldout_rows,
            rows=self._setup.micro_rows * 2,
            accelerator=self._accelerator,
            arrangement=self._arrangement,
            report=self._report,
        )

    def _sampled_batches(self) -> SampledBatches:
        return SampledBatches(
            task=self._task,
            config=self._config,
            rows=self._setup.train_rows,
            micro_rows=self._setup.micro_rows,
            total_steps=self._setup.total_steps,
            arrangement=self._arrangement,
        )

    def _step_runner(self) -> StepRunner:
        guard, accelerator = self._config.guard, self._accelerator  # not self: a cycle would outlive the loop

        def judge(progress: Progress, loss: float, norm: float) -> divergence.StepDecision:
            return divergence.check_scaled_step(guard, progress, loss, norm, accelerator.scaler)

        return StepRunner(
            trained=self._trained,
            task=self._task,
            config=self._config,
            rate=self._setup.rate,
            total_steps=self._setup.total_steps,
            micro_rows=self._setup.micro_rows,
            batches=self._batches,
            judge=judge,
            before_update=self._checkpoints.snapshots.before_update,
            stop_requested=self._run.drain.exists,
        )

    def _report_start(self) -> None:
        count = sum(p.numel() for p in self._trained.parameters.values())
        total = sum(map(loading.size, self._trained.bare.parameters()))
        self._report.log(
            f"{self._config.model}: {count:,} of {total:,} weights are "
            f"trained on {self._arrangement.describe()}; {len(self._setup.train_rows)} rows, "
            f"{len(self._setup.heldout_rows)} held out, {self._setup.total_steps} steps of "
            f"{self._config.global_batch_rows}"
        )
        if dropped := self._setup.dropped_rows:
            self._report.log(f"{dropped} rows dropped: no target within max_length {self._config.max_length}")

    def run(self) -> None:
        """Train to the end and write the snapshot with the results. Raises: Drained, after saving, if asked to stop."""
        self._check_determinism()
        self._restore()
        self._checkpoints.start()
        try:
            self._measure_baseline()
            self._trained.bare.train()
            first = self._progress.step
            while self._should_continue():
                self._step()
                if self._job.probe and self._progress.step == first + 1:
                    self._check_memory()
                self._after_step()
            self._finish(first)
        except Drained:
            if self._progress.step or self._progress.micro_batch_index:
                self._set_status(phase="draining", message="saving before the end")
                self._save_last()
            raise
        except divergence.Rollback:
            self._checkpoints.snapshots.join()
            raise
        finally:
            self._metrics.close()

    def _save_last(self) -> None:
        """Save a last checkpoint. No process waits for another process, because the other process may be ending."""
        if self._arrangement.world == 1 and self._checkpoints.has(self._progress):
            return
        self._checkpoints.save(self._progress, last=True)
        self._checkpoints.snapshots.join()
        self._checkpoints.report_save_failure()

    def memory(self) -> str:
        """Return one line that lists the uses of the memory."""
        peak = self._report.peak()
        return memory_line(self._trained.bare, self._trained.optimizer, peak=peak, expected=self._job.memory)

    def _check_determinism(self) -> None:
        """Run the first rows forward and backward, and require deterministic kernels if all operations have one.

        DDP is bypassed, because DDP would wait for gradients that do not reach it.
        """
        if not torch.are_deterministic_algorithms_enabled():
            return
        self._report.set(0, phase="loading", message="trying the first rows")
        rows, device = self._batches.at(0).micro_batches[0], self._trained.device
        self._trained.bare.train()
        self._task.data.begin_step(0)
        # The model is compiled later, for the mode that this check chooses.
        eager = torch.compiler.set_stance("force_eager") if self._config.compile else contextlib.nullcontext()
        with eager, torch.random.fork_rng([device] if device.type == "cuda" else []):
            lacks = determinism.first_nondeterministic_operation(lambda: self._runner.dry_run(rows, self._trained.bare))
        (any_lacks,) = self._arrangement.any_rank(bool(lacks))
        determinism.require_or_report(lacks or "a part of the model in another process" * any_lacks)

    def _check_memory(self) -> None:
        """Run the longest rows forward and backward with the optimizer's full state.

        A lack of memory shows now instead of an hour later. Nothing is learned from the rows.
        """
        longest = mmap_dataset.largest(self._setup.train_rows, self._setup.micro_rows, self._task.data.size)
        self._runner.dry_run(longest, self._trained.model)
        self._report.log(f"probe: {len(longest)} rows of up to {self._task.data.size(longest[0])} tokens fit")

    def _should_continue(self) -> bool:
        """Evaluate before the next step and return True if training continues.

        If an evaluation followed its step directly, a process that stopped between step and evaluation would lose the
        evaluation.
        """
        if self._progress.step >= self._setup.total_steps:
            return False
        self._evaluate_if_due()
        if reason := model_selection.early_stop_reason(self._config.selection, self._progress.scores):
            self._report.event("early_stop", reason)
        return not reason

    def _step(self) -> None:
        """Run one step and record it. Raises: Drained, Rollback, UserFault."""
        self._apply_row_skips()
        result = self._runner.run(self._progress)
        match result:
            case InterruptedStep():
                self._progress = result.progress
                raise Drained
            case DivergedStep():
                self._leave_diverged(result.decision)
            case CompletedStep():
                if result.decision.message:
                    self._report.event(result.decision.event, result.decision.message)
                self._progress = result.progress
                self._metrics.step(result)

    def _apply_row_skips(self) -> None:
        """Skip the rows that made a previous worker diverge."""
        before = self._progress
        self._progress = divergence.skip_rows(before, self._job.jumps)
        if self._progress.samples != before.samples:
            self._trained.optimizer.zero_grad(set_to_none=True)
            skipped = self._progress.samples - before.samples
            self._report.event(
                "left_out", f"after step {before.step}: {skipped} rows are left out; training continues after them"
            )

    def _leave_diverged(self, decision: divergence.StepDecision) -> None:
        """Report a step that the training cannot skip. Raises: Rollback, UserFault."""
        self._report.event(decision.event, decision.message)
        if decision.verdict == "back":
            raise divergence.Rollback(
                divergence.rollback_plan(self._config.guard, self._progress, self._config.global_batch_rows)
            )
        raise UserFault(decision.message)

    def _after_step(self) -> None:
        """Save a snapshot if one is due. Raises: Drained if a process is asked to stop."""
        self._checkpoints.snapshots.check()
        self._report.flush()
        is_due = self._checkpoints.is_due()
        drain, save = self._arrangement.any_rank(self._run.drain.exists(), is_due and self._accelerator.is_main_process)
        if drain:
            raise Drained
        if save and self._progress.step < self._setup.total_steps:
            self._checkpoints.save(self._progress)

    def _evaluate_if_due(self) -> None:
        step, every = self._progress.step, self._config.eval_every_steps
        is_due = every and self._setup.heldout_rows and step and step % every == 0
        if is_due and all(at != step for at, _ in self._progress.heldout):
            self._evaluate()

    def _restore(self) -> None:
        """Resume where the checkpoint ends, or start from the beginning."""
        total = self._setup.total_steps
        self._progress = self._checkpoints.restore(micro_rows=self._setup.micro_rows)
        self._choose_rate()
        if self._progress.step > total:
            self._report.log(f"notice: max_steps or epochs give {total} steps, and {self._progress.step} are done")
        self._metrics.begin(self._progress)
        if self._job.restore is None:
            return self._set_status(phase="evaluating", message="", total_steps=total)
        return self._set_status(
            phase="training",
            message="",
            total_steps=total,
            heldout_loss_before=self._progress.heldout_loss_before,
            heldout_loss=self._progress.heldout[-1][1] if self._progress.heldout else None,
        )

    def _measure_baseline(self) -> None:
        """Measure the untuned model before the first step, once in the life of a job."""
        if self._progress.step or self._progress.micro_batch_index:
            return
        if self._setup.heldout_rows:
            loss, metrics = self._evaluate()
            self._progress = self._progress.model_copy(
                update={"heldout_loss_before": loss, "metrics_before": dict(metrics)}
            )
            self._set_status(heldout_loss_before=loss)
        prompts = self._config.samples.prompts
        if prompts and self._config.adapters is None:
            samples = [""] * len(prompts)
            if self._task.samples.keeps_base_samples:
                samples = self._evaluator.generate_samples(alone=self._arrangement.world == 1)
            self._progress = self._progress.model_copy(update={"base_samples": tuple(samples)})

    def _evaluate(self) -> tuple[float, Mapping[str, float]]:
        """Return (loss, metrics) of the current weights, and record both; all processes enter."""
        loss, metrics = self._arrangement.first(*self._evaluator.evaluate(self._progress))
        step = self._progress.step
        model_selection.value(self._config.selection, loss, metrics)
        if step:
            self._progress = self._selection.scored(self._progress, loss, metrics, self._trained.parameters)
        heldout = (*(h for h in self._progress.heldout if h[0] != step), (step, loss))
        self._progress = self._progress.model_copy(update={"heldout": heldout})
        self._metrics.heldout(self._progress, loss, metrics)
        return loss, metrics

    def _choose_rate(self) -> None:
        """Choose the learning rate if the job has `lr: auto`; the first start of a run fixes it."""
        restored = self._progress.rate if self._setup.rate.source else None
        rate = (restored or self._setup.rate) if self._setup.rate.source else None
        self._progress = self._progress.model_copy(update={"rate": rate})
        if rate is not None:
            suffix = ", as before" if restored else ""
            self._report.event("learning_rate", f"optim.lr auto: {rate.lr:.3g}{suffix} ({rate.source})")

    def _rate(self) -> Rate:
        """Return the learning rate of this run."""
        return self._progress.rate or self._setup.rate

    def _finish(self, first: int) -> None:
        """Write the results; `first` is the step at which this start began. Raises: ResultsNotWritten, Drained."""
        folder, trained = self._run.root / "artifacts", self._progress.step > first
        if trained and self._results_may_be_slow() and not self._checkpoints.has(self._progress):
            self._checkpoints.save(self._progress)
            self._checkpoints.snapshots.before_update()  # writing the results may load the best weights
        try:
            self._write_results(folder)
        except Drained:
            if self._accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except result_writer.ResultsNotWritten as e:
            if self._save_without_results(folder):
                saved = f"the training itself is saved at step {self._progress.step}"
                raise result_writer.ResultsNotWritten(f"{e}; {saved}, the next attempt only writes them") from None
            raise

    def _results_may_be_slow(self) -> bool:
        """Return True if the results may finish much later than the training, or not at all.

        The trained state is then saved first. A single process with held-out rows, but without samples and merge, is
        exempt, because it stops at once when asked to.
        """
        config, several = self._config, self._arrangement.world > 1
        return bool(config.samples.prompts) or config.output.merge or (bool(self._setup.heldout_rows) and several)

    def _save_without_results(self, unfinished: Path) -> bool:
        """Remove the unfinished results and save the trained state in their place on the disk; all processes enter.

        Return True if it is saved.
        """
        if self._accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        if self._checkpoints.has(self._progress):
            return True
        with barrier.long_barrier("checkpoint"):
            self._checkpoints.save(self._progress, last=True)
            self._checkpoints.snapshots.join()
        return self._checkpoints.has(self._progress)

    def _write_results(self, folder: Path) -> None:
        """Write the results; all processes enter. Raises: ResultsNotWritten, Drained."""
        after, metrics = self._evaluate() if self._setup.heldout_rows else (None, {})
        self._evaluator.leave_if_asked()
        reshard = functools.partial(self._arrangement.reshard, self._trained.bare)
        with self._selection.chosen(self._progress, reshard, self._trained.parameters) as step:
            if step is not None:
                self._report.event("best", f"the result has the weights of step {step}, which were judged best")
                after, metrics = self._evaluator.evaluate(self._progress)
            samples = self._evaluator.write_samples(self._progress, after)
            self._checkpoints.settle()  # a checkpoint's copy and the results must not be in host memory at once
            self._evaluator.write(folder, self._progress, self._rate(), samples=samples, after=after, metrics=metrics)
        self._evaluator.retry_together(
            lambda: self._checkpoints.finish(self._progress, folder), lambda: self._checkpoints.checkpoint_bytes(folder)
        )
        if self._accelerator.is_main_process:  # only after all have written their parts: each retry needs the folder
            shutil.rmtree(folder, ignore_errors=True)

    def _set_status(self, **changes: Any) -> None:
        self._report.set(self._progress.step, **changes)
