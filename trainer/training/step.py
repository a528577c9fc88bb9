"""Optimizer step of the training, resumable at every micro-batch, and its setup on this process's device."""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed

from trainer import tasks
from trainer.batching import mmap_dataset as kept
from trainer.batching import sampler as order
from trainer.contract.checkpoint_format import Progress
from trainer.core.errors import Drained, UserFault
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.models import accelerations as switches
from trainer.models import loading as model
from trainer.optim import learning_rates, optimizers
from trainer.parallel import barrier as meeting
from trainer.parallel import ddp as parallel
from trainer.parallel import device_check as devices
from trainer.parallel import fsdp as shares
from trainer.training import determinism as exact
from trainer.training import divergence as guard
from trainer.training import evaluation as evaluate
from trainer.training.reporter import Reporter


class Steps(ABC):
    """Model, optimizer and rows in step with the other processes; `Loop` decides when to step."""

    def __init__(self, job: WorkerJob, run: RunFolder) -> None:
        self._job, self._run, self._config = job, run, job.train
        config = job.train
        self._join()
        self._task = tasks.of(config)
        with meeting.long_barrier("rows"):
            examples, self._dropped = self._task.examples(
                Path(job.data), job.data_format, cache=run.root, data_sha256=job.data_sha256
            )
        self._train, self._held = kept.train_eval_split(examples, config.seed, config.data.eval_share)
        order.check_rows_per_step(len(self._train), config.rows_a_step)
        self._total = learning_rates.total_steps(config, len(self._train))
        self._micro = min(config.rows_at_once, math.ceil(config.rows_a_step / self._parallel.groups))
        self._bare = self._parallel.build(self._made)
        self._parameters = model.trainable(self._bare)
        self._rate = learning_rates.of(config, self._bare)
        optimizer = optimizers.of(self._parameters, config.optim, divided=self._parallel.divided)
        if config.tf32:
            switches.tf32(self._device)
        if config.fp8:
            switches.fp8(parallel.layers(self._bare) if config.adapters is None else (), self._device)
        if config.compile:
            switches.compiled(parallel.layers(self._bare), self._device)
        with evaluate.as_trained(config, self._accelerator):
            self._task.model.check_on_device(self._bare, self._device)
        self._model, self._optimizer = self._parallel.prepare(self._bare, optimizer)
        self._progress = Progress()

    def _join(self) -> None:
        """Join the other processes and check the device."""
        config, cpu = self._config, not torch.cuda.is_available()
        parallel.join(self._job.parallelism, cpu=cpu)
        self._device = accelerate.PartialState(cpu=cpu).device
        self._precision = model.precision_of(config, self._device)
        mixed = "no" if self._precision == "fp32" else self._precision
        self._accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision=mixed)
        self._parallel = shares.of(self._job.parallelism, self._accelerator, self._precision)
        self._parallel.validate(config)
        self._world = self._parallel.world
        self._report = Reporter(self._run, self._accelerator)
        self._report.say(devices.check(self._device))
        self._report.set(0, phase="loading", message=f"loading {config.model}")
        set_seed(config.seed)

    def _made(self, hollow: bool) -> Any:
        """Return the model once all processes have read their weights."""
        with meeting.long_barrier("weights"):
            return self._task.model.build(self._precision, hollow=hollow)

    def _batches(self) -> tuple[list[list[Any]], int]:
        """Return this process's micro-batches of the next step, and the number of losses in the whole step.

        If they do not divide evenly, a process takes an empty turn, so that all enter the same collectives.
        """
        mine, targets = self._batches_at(self._progress.samples)
        if self._task.data.prepares_ahead and self._progress.step + 1 < self._total:
            following, _ = self._batches_at(self._progress.samples + self._config.rows_a_step)
            self._task.data.prepare_ahead([e for micro in following for e in micro])
        return mine, targets

    def _batches_at(self, samples: int) -> tuple[list[list[Any]], int]:
        """Return the micro-batches of the step that begins after `samples` rows."""
        config = self._config
        rows = order.step_rows(config.seed, samples, config.rows_a_step, len(self._train))
        micros = self._task.data.micro_batches([self._train[i] for i in rows], self._micro)
        targets = sum(self._task.data.targets(e) for micro in micros for e in micro)
        micros += [[] for _ in range(-len(micros) % self._parallel.groups)]
        return micros[self._parallel.group :: self._parallel.groups], targets

    def _step(self) -> None:
        """Do one optimizer step, or the rest of it after a restore within the step."""
        started = time.monotonic()
        self._apply_row_skips()
        self._task.data.begin_step(self._progress.step)
        batches, targets = self._batches()
        loss = torch.tensor(self._progress.micro_loss, dtype=torch.float64, device=self._device)
        for number in range(self._progress.micro_batch_index, len(batches)):
            last = number == len(batches) - 1
            set_seed(
                order.micro_batch_seed(
                    self._config.seed, self._progress.step, number * self._parallel.groups + self._parallel.group
                )
            )
            with contextlib.nullcontext() if last else self._parallel.no_sync(self._model):
                part = self._forward(batches[number])
                self._accelerator.backward(part * (self._parallel.averaged / targets))
            loss += part.detach()
            if not last and self._world == 1 and self._run.drain.exists():
                halfway = {"micro_batch_index": number + 1, "micro_rows": self._micro, "micro_loss": float(loss)}
                self._progress = self._progress.model_copy(update=halfway)
                raise Drained
        norm = self._clip()
        loss = self._parallel.total(loss)
        rate = learning_rates.learning_rate(
            self._rate.lr, self._config.optim.warmup_share, self._progress.step, self._total
        )
        row = {"loss": float(loss) / targets, "lr": rate, "grad_norm": norm}
        if self._is_good(row):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._before_update()
            self._optimizer.step()
        elif (scaler := self._accelerator.scaler) is not None:
            # The gradients are unscaled already, and only an update prepares the scaler for the next ones. The scale
            # stays, because it did not cause the loss.
            scaler.update(scaler.get_scale())
        self._optimizer.zero_grad(set_to_none=True)
        tokens = sum(self._task.data.size(e) for b in batches for e in b) * self._parallel.groups
        self._record(row, tokens, time.monotonic() - started)

    def _apply_row_skips(self) -> None:
        """Skip the rows that made a previous worker diverge."""
        before = self._progress
        self._progress = guard.skip_rows(before, self._job.jumps)
        if self._progress.samples != before.samples:
            self._optimizer.zero_grad(set_to_none=True)
            left = self._progress.samples - before.samples
            self._report.event(
                "left_out", f"after step {before.step}: {left} rows are left out, and the data goes on behind"
            )

    def _is_good(self, row: dict[str, float]) -> bool:
        """Return True if this step may update the weights. Raises: Rollback, UserFault."""
        norm, scaler = row["grad_norm"], self._accelerator.scaler
        overflowed = scaler is not None and math.isfinite(row["loss"]) and not math.isfinite(norm)
        if overflowed and scaler.get_scale() >= guard.LEAST_SCALE:
            norm = 0.0  # the scaler skips the step and halves the scale
        verdict, care, told = guard.check_step(self._config.guard, self._progress, row["loss"], norm)
        if verdict == "back":
            jumps = guard.rollback_plan(self._config.guard, self._progress, self._config.rows_a_step)
        self._progress = self._progress.model_copy(update={"guard": care})
        if told:
            self._report.event(
                {"go": "spike", "skip": "skipped", "back": "rolled_back", "stop": "diverged"}[verdict], told
            )
        if verdict == "back":
            raise guard.Rollback(jumps)
        if verdict == "stop":
            raise UserFault(told)
        return verdict == "go"

    def _clip(self) -> float:
        """Clip the gradients to the norm limit, and return their norm before clipping."""
        return self._parallel.clip(self._parameters.values(), self._config.optim.clip_norm)

    def _probe(self) -> None:
        """Run the longest rows forward and backward with the optimizer's full state.

        A lack of memory shows now instead of an hour later. Nothing is learned from the rows.
        """
        longest = kept.largest(self._train, self._micro, self._task.data.size)
        self._dry_forward_backward(longest, self._model)
        self._report.say(f"probe: {len(longest)} rows of up to {self._task.data.size(longest[0])} tokens fit")

    def _check_determinism(self) -> None:
        """Run the first rows forward and backward to check for deterministic kernels, and require them if all are.

        DDP is bypassed, because it would wait for gradients that it does not see.
        """
        if not torch.are_deterministic_algorithms_enabled():
            return
        self._report.set(0, phase="loading", message="trying the first rows")
        rows = self._batches_at(0)[0][0]
        self._bare.train()
        self._task.data.begin_step(0)
        # Compiled for the mode that follows.
        eager = torch.compiler.set_stance("force_eager") if self._config.compile else contextlib.nullcontext()
        with eager, torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            lacks = exact.lacking(lambda: self._dry_forward_backward(rows, self._bare))
        (somewhere,) = self._parallel.any_rank(bool(lacks))
        exact.settle(lacks or "a part of the model in another process" * somewhere)

    def _dry_forward_backward(self, rows: list[Any], model: Any) -> None:
        """Run rows forward and backward without learning.

        A buffer that the model itself replaces, such as dynamic positions, stays changed.
        """
        before = [(buffer, buffer.clone()) for buffer in self._bare.buffers()]
        targets = max(1, sum(self._task.data.targets(e) for e in rows))
        self._accelerator.backward(self._forward(rows, model) / targets)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

    def _forward(self, batch: list[Any], model: Any = None) -> torch.Tensor:
        made = self._parallel.shard_sequence(self._task.data.collate(batch or self._train[:1], self._device))
        loss = self._task.model.loss_sum(self._model if model is None else model, made)
        return loss if batch else loss * 0.0

    @abstractmethod
    def _before_update(self) -> None:
        """Prepare for a change of weights and moments."""

    @abstractmethod
    def _record(self, row: dict[str, float], tokens: int, seconds: float) -> None:
        """Record a completed step."""
