"""The trainer's own step around a given model, which `trainer.memtrace.tracer` traces."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import accelerate
import torch

from trainer.contract.checkpoint_format import Progress, Rate
from trainer.contract.train import TrainConfig
from trainer.memtrace import quantised
from trainer.memtrace.inputs import BY_TASK
from trainer.memtrace.storage_tracker import Storages
from trainer.models import loading
from trainer.optim import optimizers
from trainer.parallel import ddp
from trainer.training.step import Steps


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
    """Weights are held in half precision, which also computes, without autocast."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters, in place of the trainer's choice."""
    task: str = "causal_lm"
    """Task to trace, one of `inputs.BY_TASK`."""
    gpus: int = 1
    """Processes, each with rows of its own."""
    divided: bool = False
    """Each process holds a shard of the model (FSDP 2), instead of all of it (DDP)."""


class Probe(Steps):
    """The trainer's step around a model that `make` builds on a device, for one step of one micro-batch."""

    def __init__(
        self, ask: TraceOptions, make: Callable[[], Any], storages: Storages, task: Any, device: str = "meta"
    ) -> None:
        config = ask.train
        self._config = config
        mixed = "no" if config.precision == "fp32" or ask.pure else "bf16"  # fp16 needs the same bytes
        self._accelerator = accelerate.Accelerator(cpu=device != "cuda", mixed_precision=mixed, device_placement=False)
        self._parallel = self._arranged(ask, "fp32" if mixed == "no" else mixed, meta=device == "meta")
        self._parallel.validate(config)
        self._world, self._rank = self._parallel.world, self._parallel.rank
        self._bare = make() if self._world == 1 else self._parallel.build(lambda _: make())
        self._parameters = loading.trainable(self._bare)
        self._rate = Rate(lr=1e-4)
        optimizer = optimizers.of(self._parameters, config.optim, divided=self._parallel.divided)
        if ask.foreach:
            for group in optimizer.param_groups:
                group.update(fused=None, foreach=True)
        self._device = next(self._bare.parameters()).device
        with storages:  # DDP makes its buckets here
            self._model, self._optimizer = self._parallel.prepare(self._bare, optimizer)
        self._storages = storages
        self._progress, self._total, self._task = Progress(), 1, task
        row = BY_TASK[ask.task].row
        self._rows = [row(ask.sequence, ask.target or ask.sequence)] * config.rows_at_once
        if ask.padded:
            self._rows[-1] = row(ask.sequence - 1, ask.target or ask.sequence - 1)

    def _arranged(self, ask: TraceOptions, precision: str, *, meta: bool) -> ddp.DataParallel:
        if ask.gpus == 1:
            return ddp.DataParallel(self._accelerator)
        from trainer.memtrace import (
            fake_distributed,
        )  # imports all of torch's FSDP 2, which one process does not need

        return fake_distributed.arrangement(self._accelerator, precision, divided=ask.divided, meta=meta)

    def _gathered(self) -> Iterable[torch.nn.Parameter]:
        if not self._parallel.divided:
            return ()
        from trainer.memtrace import fake_distributed

        return fake_distributed.gathered(self._bare)

    def _batches(self) -> tuple[list[list[Any]], int]:
        return [self._rows], sum(self._task.data.targets(e) for e in self._rows)

    def _apply_row_skips(self) -> None:
        """Do nothing: no earlier worker diverged."""

    def _is_good(self, row: dict[str, float]) -> bool:
        return True

    def _before_update(self) -> None:
        self._storages.enter("optimizer", "temporary")

    def _record(self, row: dict[str, float], tokens: int, seconds: float) -> None:
        pass

    def warm(self) -> None:
        """Make the optimizer's state, which exists after the first step."""
        if self._world > 1:
            with self._storages:
                self._bare.train()
                self._step()
            return
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, storages: Storages) -> None:
        """Run one step in the steady state.

        With several micro-batches this is the last of them, and accumulated gradients exist.
        """
        for tensor in (*self._bare.parameters(), *self._bare.buffers(), *quantised.scales(self._bare)):
            storages.hold(ddp.local(tensor), "weights")
        for state in self._optimizer.state.values():
            for value in state.values():
                storages.hold(ddp.local(value), "optimizer")
        accumulated = self._config.rows_a_step > self._config.rows_at_once * self._parallel.groups
        for gathered in self._gathered():
            gathered.register_post_accumulate_grad_hook(lambda p: storages.hold(p.grad, "communication"))
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda p: storages.hold(ddp.local(p.grad), "gradients"))
            if accumulated:
                parameter.grad = torch.zeros_like(parameter)
                storages.hold(ddp.local(parameter.grad), "gradients")
        self._bare.train()
        self._step()
