"""The trainer's own step around a given model, which `trainer.memtrace.tracer` traces."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import accelerate
import torch

from trainer.contract.checkpoint_format import GuardState, Progress, Rate
from trainer.contract.train import TrainConfig
from trainer.memtrace import quantised
from trainer.memtrace.inputs import BY_TASK
from trainer.memtrace.storage_tracker import Storages
from trainer.models import loading
from trainer.optim import optimizers
from trainer.parallel import ddp
from trainer.training.divergence import StepDecision
from trainer.training.setup import TrainedModel
from trainer.training.step import StepBatches, StepRunner


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options of a trace; defaults as the trainer's. `sequence`: tokens of every row."""

    train: TrainConfig
    sequence: int
    target: int = 0
    """Tokens of each row that an encoder-decoder generates; 0: as many as it reads."""
    attention: str = "sdpa"
    device: str = "cuda"
    foreach: bool = False
    """Use AdamW's foreach kernels in place of the fused one."""
    padded: bool = False
    """Rows differ in length, so attention needs a mask."""
    pure: bool = False
    """Hold the weights in half precision and compute in it, without autocast."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters, in place of the trainer's choice."""
    task: str = "causal_lm"
    """Task to trace, one of `inputs.BY_TASK`."""
    gpus: int = 1
    """Processes, each with rows of its own."""
    divided: bool = False
    """Each process holds a shard of the model (FSDP 2), instead of all of it (DDP)."""


@dataclass(frozen=True)
class _SameRows:
    """The same micro-batch in each step."""

    rows: list[Any]
    targets: int

    def of_step(self, progress: Progress) -> StepBatches:
        return StepBatches([self.rows], self.targets)

    def filler(self) -> list[Any]:
        return self.rows[:1]


class Probe:
    """The trainer's step, with one micro-batch, for a model that `make` builds on a device."""

    def __init__(
        self, ask: TraceOptions, make: Callable[[], Any], storages: Storages, task: Any, device: str = "meta"
    ) -> None:
        self._config, self._storages = ask.train, storages
        self.trained = self._build(ask, make, device)
        row = BY_TASK[ask.task].row
        rows = [row(ask.sequence, ask.target or ask.sequence)] * ask.train.micro_batch_rows
        if ask.padded:
            rows[-1] = row(ask.sequence - 1, ask.target or ask.sequence - 1)
        self.runner = StepRunner(
            trained=self.trained,
            task=task,
            config=ask.train,
            rate=Rate(lr=1e-4),
            total_steps=1,
            micro_rows=len(rows),
            batches=_SameRows(rows, sum(map(task.data.targets, rows))),
            judge=lambda progress, loss, norm: StepDecision("go", GuardState(), ""),
            before_update=lambda: storages.enter("optimizer", "temporary"),
            stop_requested=lambda: False,
        )

    def _build(self, ask: TraceOptions, make: Callable[[], Any], device: str) -> TrainedModel:
        config = ask.train
        mixed = "no" if config.precision == "fp32" or ask.pure else "bf16"  # fp16 needs the same bytes
        accelerator = accelerate.Accelerator(cpu=device != "cuda", mixed_precision=mixed, device_placement=False)
        arrangement = self._arrangement(accelerator, ask, "fp32" if mixed == "no" else mixed, meta=device == "meta")
        arrangement.validate(config)
        bare = make() if arrangement.world == 1 else arrangement.build(lambda _: make())
        parameters = loading.trainable(bare)
        optimizer = optimizers.build_optimizer(parameters, config.optim, divided=arrangement.divided)
        if ask.foreach:
            for group in optimizer.param_groups:
                group.update(fused=None, foreach=True)
        with self._storages:  # DDP makes its buckets here
            model, prepared = arrangement.prepare(bare, optimizer)
        return TrainedModel(
            bare=bare,
            model=model,
            parameters=parameters,
            optimizer=prepared,
            accelerator=accelerator,
            arrangement=arrangement,
            device=next(bare.parameters()).device,
        )

    def _arrangement(
        self, accelerator: accelerate.Accelerator, ask: TraceOptions, precision: str, *, meta: bool
    ) -> ddp.DataParallel:
        if ask.gpus == 1:
            return ddp.DataParallel(accelerator)
        from trainer.memtrace import (
            fake_distributed,
        )  # imports all of torch's FSDP 2, which one process does not need

        return fake_distributed.arrangement(accelerator, precision, divided=ask.divided, meta=meta)

    def _gathered(self) -> Iterable[torch.nn.Parameter]:
        if not self.trained.arrangement.divided:
            return ()
        from trainer.memtrace import fake_distributed

        return fake_distributed.gathered(self.trained.bare)

    def warm(self) -> None:
        """Make the optimizer's state, which exists after the first step."""
        if self.trained.arrangement.world > 1:
            with self._storages:
                self.trained.bare.train()
                self.run_step()
            return
        for parameter in self.trained.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.trained.optimizer.step()
        self.trained.optimizer.zero_grad(set_to_none=True)

    def step(self, storages: Storages) -> None:
        """Run one step in the steady state.

        With several micro-batches this is the last of them, and accumulated gradients exist.
        """
        bare, parameters = self.trained.bare, self.trained.parameters
        for tensor in (*bare.parameters(), *bare.buffers(), *quantised.scales(bare)):
            storages.hold(ddp.local(tensor), "weights")
        for state in self.trained.optimizer.state.values():
            for value in state.values():
                storages.hold(ddp.local(value), "optimizer")
        groups = self.trained.arrangement.groups
        accumulated = self._config.global_batch_rows > self._config.micro_batch_rows * groups
        for gathered in self._gathered():
            gathered.register_post_accumulate_grad_hook(lambda p: storages.hold(p.grad, "communication"))
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda p: storages.hold(ddp.local(p.grad), "gradients"))
            if accumulated:
                parameter.grad = torch.zeros_like(parameter)
                storages.hold(ddp.local(parameter.grad), "gradients")
        bare.train()
        self.run_step()

    def run_step(self) -> None:
        """Run the trainer's step on the same rows."""
        self.runner.run(Progress())
