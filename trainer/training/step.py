"""One optimizer step: forward, backward, clip, guard and update, resumable at every micro-batch."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from accelerate.utils import set_seed

from trainer.batching import sampler
from trainer.contract.checkpoint_format import Progress, Rate
from trainer.contract.train import TrainConfig
from trainer.optim import learning_rates
from trainer.parallel.ddp import DataParallel
from trainer.tasks.common.task import Task
from trainer.training.divergence import StepDecision
from trainer.training.setup import TrainedModel


class StepBatches(NamedTuple):
    """Micro-batches of one step for this process."""

    micro_batches: list[list[Any]]
    targets: int
    """Number of losses in the step over all processes."""


class BatchSource(Protocol):
    """Source of the rows of each step."""

    def of_step(self, progress: Progress) -> StepBatches:
        """Return this process's micro-batches of the next step."""

    def filler(self) -> list[Any]:
        """Return the rows that a process computes in place of an empty micro-batch; their loss does not count."""


@dataclass(frozen=True, kw_only=True)
class SampledBatches:
    """Rows in the order that the job's seed determines, divided between the processes."""

    task: Task[Any]
    config: TrainConfig
    rows: Sequence[Any]
    micro_rows: int
    total_steps: int
    arrangement: DataParallel

    def of_step(self, progress: Progress) -> StepBatches:
        """Return this process's micro-batches of the next step, and let the task prepare the step after it."""
        batches = self.at(progress.samples)
        if self.task.data.prepares_ahead and progress.step + 1 < self.total_steps:
            following = self.at(progress.samples + self.config.global_batch_rows)
            self.task.data.prepare_ahead([e for micro in following.micro_batches for e in micro])
        return batches

    def at(self, samples: int) -> StepBatches:
        """Return the micro-batches of the step that begins after `samples` rows.

        If they do not divide evenly, some processes get an empty micro-batch, so that all enter the same collectives.
        """
        numbers = sampler.step_rows(self.config.seed, samples, self.config.global_batch_rows, len(self.rows))
        micros = self.task.data.micro_batches([self.rows[i] for i in numbers], self.micro_rows)
        targets = sum(self.task.data.targets(e) for micro in micros for e in micro)
        groups = self.arrangement.groups
        micros += [[] for _ in range(-len(micros) % groups)]
        return StepBatches(micros[self.arrangement.group :: groups], targets)

    def filler(self) -> list[Any]:
        return list(self.rows[:1])


@dataclass(frozen=True, kw_only=True)
class CompletedStep:
    """Optimizer step that was computed; the guard may have skipped its update."""

    progress: Progress
    """Progress after the step."""
    decision: StepDecision
    row: dict[str, float]
    """Loss per target, learning rate and gradient norm."""
    tokens: int
    """Tokens of this process's rows times the number of groups: an estimate of the step's total."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class InterruptedStep:
    """Step that a stop request ended between two micro-batches; `progress` counts the accumulated micro-batches."""

    progress: Progress


@dataclass(frozen=True, kw_only=True)
class DivergedStep:
    """Step after which the training must roll back or fail; it changed nothing."""

    decision: StepDecision


StepResult = CompletedStep | InterruptedStep | DivergedStep


@dataclass(frozen=True, kw_only=True)
class StepRunner:
    """Runner of optimizer steps; it holds no progress."""

    trained: TrainedModel
    task: Task[Any]
    config: TrainConfig
    rate: Rate
    """Learning rate that applies if the progress records none."""
    total_steps: int
    micro_rows: int
    batches: BatchSource
    judge: Callable[[Progress, float, float], StepDecision]
    """Guard against bad steps: its arguments are the progress, the loss and the gradient norm."""
    before_update: Callable[[], None]
    """Called before weights and moments change."""
    stop_requested: Callable[[], bool]

    def run(self, progress: Progress) -> StepResult:
        """Run the next step, or its rest after a restore within the step. Collective: every process must call it."""
        started, trained = time.monotonic(), self.trained
        self.task.data.begin_step(progress.step)
        batches = self.batches.of_step(progress)
        computed = self._accumulate(progress, batches)
        if isinstance(computed, InterruptedStep):
            return computed
        norm = self._clip()
        loss = float(trained.arrangement.total(computed)) / batches.targets
        highest = (progress.rate or self.rate).lr
        rate = learning_rates.learning_rate(highest, self.config.optim.warmup_share, progress.step, self.total_steps)
        decision = self.judge(progress, loss, norm)
        if decision.verdict in ("back", "stop"):
            return DivergedStep(decision=decision)
        self._update(rate, skip=decision.verdict == "skip")
        rows = (e for micro in batches.micro_batches for e in micro)
        return CompletedStep(
            progress=_after_step(progress, decision, self.config.global_batch_rows),
            decision=decision,
            row={"loss": loss, "lr": rate, "grad_norm": norm},
            tokens=sum(map(self.task.data.size, rows)) * trained.arrangement.groups,
            seconds=time.monotonic() - started,
        )

    def _accumulate(self, progress: Progress, batches: StepBatches) -> torch.Tensor | InterruptedStep:
        """Add the gradients of the remaining micro-batches; return the sum of this process's losses."""
        trained, micros = self.trained, batches.micro_batches
        scale = trained.arrangement.gradient_divisor / batches.targets
        loss = torch.tensor(progress.micro_loss, dtype=torch.float64, device=trained.device)
        for number in range(progress.micro_batch_index, len(micros)):
            last = number == len(micros) - 1
            self._seed(progress.step, number)
            with contextlib.nullcontext() if last else trained.arrangement.no_sync(trained.model):
                part = self._forward(micros[number])
                trained.accelerator.backward(part * scale)
            loss += part.detach()
            if not last and trained.arrangement.world == 1 and self.stop_requested():
                halfway = {"micro_batch_index": number + 1, "micro_rows": self.micro_rows, "micro_loss": float(loss)}
                return InterruptedStep(progress=progress.model_copy(update=halfway))
        return loss

    def _seed(self, step: int, number: int) -> None:
        """Seed the generators for this process's micro-batch `number` of a step."""
        arrangement = self.trained.arrangement
        set_seed(sampler.micro_batch_seed(self.config.seed, step, number * arrangement.groups + arrangement.group))

    def _clip(self) -> float:
        """Clip the gradients to the norm limit, and return their norm before clipping."""
        return self.trained.arrangement.clip(self.trained.parameters.values(), self.config.optim.clip_norm)

    def _update(self, rate: float, *, skip: bool) -> None:
        """Update the weights unless the guard skips the step, and clear the gradients."""
        optimizer, scaler = self.trained.optimizer, self.trained.accelerator.scaler
        if not skip:
            for group in optimizer.param_groups:
                group["lr"] = rate
            self.before_update()
            optimizer.step()
        elif scaler is not None:
            # The gradients are unscaled already, and only an update prepares the scaler for the next ones. The scale
            # stays, because it did not cause the loss.
            scaler.update(scaler.get_scale())
        optimizer.zero_grad(set_to_none=True)

    def dry_run(self, rows: list[Any], model: Any) -> None:
        """Run rows forward and backward without learning.

        A buffer that the model itself replaces, such as dynamic positions, stays changed.
        """
        before = [(buffer, buffer.clone()) for buffer in self.trained.bare.buffers()]
        targets = max(1, sum(self.task.data.targets(e) for e in rows))
        self.trained.accelerator.backward(self._forward(rows, model) / targets)
        self.trained.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

    def _forward(self, batch: list[Any], model: Any = None) -> torch.Tensor:
        """Return the sum of the batch's losses; an empty batch has the loss 0."""
        rows = self.task.data.collate(batch or self.batches.filler(), self.trained.device)
        inputs = self.trained.arrangement.shard_sequence(rows)
        loss = self.task.model.loss_sum(self.trained.model if model is None else model, inputs)
        return loss if batch else loss * 0.0


def _after_step(progress: Progress, decision: StepDecision, global_batch: int) -> Progress:
    return progress.model_copy(
        update={
            "guard": decision.state,
            "step": progress.step + 1,
            "samples": progress.samples + global_batch,
            "micro_batch_index": 0,
            "micro_loss": 0.0,
        }
    )
