"""Everything that a training needs on this process's device, built once from the job."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed

from trainer import tasks
from trainer.batching import mmap_dataset, sampler
from trainer.contract.checkpoint_format import Rate
from trainer.contract.train import TrainConfig
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.models import accelerations, loading
from trainer.optim import learning_rates, optimizers
from trainer.parallel import barrier, ddp, device_check, fsdp
from trainer.tasks.common.task import Task
from trainer.training import evaluation
from trainer.training.reporter import Reporter


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Model and optimizer on this process's device, with the processes that train them together."""

    bare: Any
    """Model as the task created it."""
    model: Any
    """Model to call in training; it may wrap `bare`."""
    parameters: dict[str, Any]
    """Trained parameters by torch's name."""
    optimizer: Any
    """Optimizer that accelerate prepared."""
    accelerator: accelerate.Accelerator
    arrangement: ddp.DataParallel
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Parts of a training that do not change after the start."""

    job: WorkerJob
    run: RunFolder
    task: Task[Any]
    train_rows: Sequence[Any]
    heldout_rows: Sequence[Any]
    dropped_rows: int
    """Number of rows without a target within `max_length`."""
    total_steps: int
    micro_rows: int
    """Rows of a micro-batch."""
    rate: Rate
    """Learning rate of a new run; a resumed run has its own in `Progress.rate`."""
    trained: TrainedModel
    report: Reporter

    @property
    def config(self) -> TrainConfig:
        return self.job.train


def build(job: WorkerJob, run: RunFolder) -> TrainingSetup:
    """Join the other processes, and read the rows and the model. Raises: Fault."""
    config = job.train
    arrangement, precision, report = _join(job, run)
    task = tasks.build_task(config)
    task.data.date = job.date
    with barrier.long_barrier("rows"):
        examples, dropped = task.examples(Path(job.data), job.data_format, cache=run.root, data_sha256=job.data_sha256)
    train_rows, heldout_rows = mmap_dataset.train_eval_split(
        examples, config.seed, config.data.eval_share, task.data.chats
    )
    sampler.check_rows_per_step(len(train_rows), config.global_batch_rows)
    total_steps = learning_rates.total_steps(config, len(train_rows))
    trained, rate = _build_model(config, task, arrangement, precision)
    return TrainingSetup(
        job=job,
        run=run,
        task=task,
        train_rows=train_rows,
        heldout_rows=heldout_rows,
        dropped_rows=dropped,
        total_steps=total_steps,
        micro_rows=min(config.micro_batch_rows, math.ceil(config.global_batch_rows / arrangement.groups)),
        rate=rate,
        trained=trained,
        report=report,
    )


def _join(job: WorkerJob, run: RunFolder) -> tuple[ddp.DataParallel, str, Reporter]:
    """Join the other processes and check the device; return (arrangement, precision, reporter)."""
    config, cpu = job.train, not torch.cuda.is_available()
    ddp.join(job.parallelism, cpu=cpu)
    device = accelerate.PartialState(cpu=cpu).device
    precision = loading.precision_of(config, device)
    mixed = "no" if precision == "fp32" else precision
    accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision=mixed)
    arrangement = fsdp.build_arrangement(job.parallelism, accelerator, precision)
    arrangement.validate(config)
    report = Reporter(run, accelerator)
    report.log(device_check.check(device))
    report.set(0, phase="loading", message=f"loading {config.model}")
    set_seed(config.seed)
    return arrangement, precision, report


def _build_model(
    config: TrainConfig, task: Task[Any], arrangement: ddp.DataParallel, precision: str
) -> tuple[TrainedModel, Rate]:
    """Return the model with its optimizer, and the learning rate of a new run."""

    def load(hollow: bool) -> Any:
        with barrier.long_barrier("weights"):
            return task.model.build(precision, hollow=hollow)

    accelerator, device = arrangement.accelerator, arrangement.accelerator.device
    bare = arrangement.build(load)
    parameters = loading.trainable(bare)
    rate = learning_rates.choose_rate(config, bare)
    optimizer = optimizers.build_optimizer(parameters, config.optim, divided=arrangement.divided)
    if config.tf32:
        accelerations.tf32(device)
    if config.fp8:
        accelerations.fp8(ddp.layers(bare) if config.adapters is None else (), device)
    if config.compile:
        accelerations.compiled(ddp.layers(bare), device)
    with evaluation.as_trained(config, accelerator):
        task.model.check_on_device(bare, device)
    model, prepared = arrangement.prepare(bare, optimizer)
    trained = TrainedModel(
        bare=bare,
        model=model,
        parameters=parameters,
        optimizer=prepared,
        accelerator=accelerator,
        arrangement=arrangement,
        device=device,
    )
    return trained, rate
