"""Translation of a job spec into the estimators' terms: steps, tokens per row, evaluated rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape, Workload
from trainer.contract.train import LowRank, OptimizerName, TrainConfig
from trainer.dataset.prompts import held_out

BYTES_A_TOKEN = 4
REFERENCE_PASSES: Mapping[str, int] = {"dpo": 1, "kto": 3}
"""Forward passes without gradients before the trained one, by task. KTO's reference point takes two of them."""
OPTIMIZERS: Mapping[OptimizerName, str] = {"adamw": "adamw_fused"}
"""The estimators' names of the trainer's optimizers, where they differ."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Sizes of a data set with rendered templates."""

    count: int
    tokens_mean: float
    tokens_longest: int
    """Mean and longest tokens of a sequence that the model reads, before `max_length` truncates it."""
    held_out: int | None = None
    """Rows held out for evaluation, of `count`; None: by `data.eval_share`."""
    sequences: int = 1
    """Sequences in a row: a preference has two."""
    written_mean: float = 0.0
    written_longest: int = 0
    """Mean and longest tokens of a row that an encoder-decoder generates, before truncation; 0 for other models."""


def steps_of(spec: JobSpec, training_rows: int) -> int:
    """Return the optimizer steps of a `train` spec over the rows to train on; a partial last batch counts."""
    train = spec.train
    assert train is not None
    if train.max_steps is not None:
        return train.max_steps
    return max(1, math.ceil(train.epochs * training_rows / train.global_batch_rows))


def workload(spec: JobSpec, shape: ModelShape | None, rows: Rows | None) -> Workload:
    """Return the whole job as a workload.

    A script has neither shape nor rows; only its checkpoint interval is known. A task without a shape is not estimated.
    Neither is DoRA, whose memory is not modelled.
    """
    train = spec.train
    if train is None or rows is None:
        return Workload(shape=None, method="script", checkpoint_every_s=spec.checkpoint.max_loss_s)
    lora = train.adapters
    blank = "DoRA" if lora and lora.dora else "" if shape else f"task {train.task} of such a model"
    heldout_rows = held_out(rows.count, train.data.eval_share) if rows.held_out is None else rows.held_out
    steps = steps_of(spec, rows.count - heldout_rows)
    longest = train.max_length if train.packing else min(rows.tokens_longest, train.max_length)
    mean_tokens = min(rows.tokens_mean, longest)
    if shape is not None and shape.pixels:  # an image has one token per patch, plus one
        longest = shape.max_positions or 1
        mean_tokens = float(longest)
    between = (steps - 1) // train.eval_every_steps if train.eval_every_steps else 0
    return Workload(
        shape=None if blank else shape,
        unestimated=blank,
        task=train.task,
        sequences=rows.sequences,
        reference=REFERENCE_PASSES.get(train.task, 0),
        **_settings(train),
        sequence=longest,
        tokens_per_row=mean_tokens,
        target_tokens=min(rows.written_longest, train.max_length),
        target_tokens_per_row=min(rows.written_mean, train.max_length),
        steps=steps,
        eval_rows=heldout_rows * (2 + between),
        checkpoint_every_s=spec.checkpoint.max_loss_s,
        data_bytes=int(rows.count * (rows.sequences * rows.tokens_mean + rows.written_mean) * BYTES_A_TOKEN),
    )


def _settings(train: TrainConfig) -> dict[str, Any]:
    """Return the fields of `Workload` that the spec determines without the data."""
    lora = train.adapters
    return {
        "method": "lora8" if train.quantised and train.quantised.bits == 8 else train.method.kind,
        "lora_r": lora.r if lora else 0,
        "lora_targets": targets_of(lora) if lora else "all-linear",
        "optimizer": optimizer_of(train),
        "attention": "sdpa" if train.attention == "auto" else train.attention,
        "precision": train.precision,
        "gradient_checkpointing": train.recomputes,
        "free_checkpointing": train.gradient_checkpointing == "auto",
        "micro_batch": train.micro_batch_rows,
        "free_micro_batch": train.micro_batch == "auto",
        "global_batch": train.global_batch_rows,
        "keeps_best": train.selection.best,
        "merges": train.output.merge,
    }


def optimizer_of(train: TrainConfig) -> str:
    """Return the estimators' name of the optimizer."""
    return OPTIMIZERS.get(train.optim.name, train.optim.name)


def targets_of(lora: LowRank) -> str:
    """Return a keyword, or names separated by commas."""
    return lora.targets if isinstance(lora.targets, str) else ",".join(lora.targets)


def remaining(work: Workload, steps_done: int) -> Workload:
    """Return the workload after `steps_done` optimizer steps.

    All evaluations remain, because most of them come at the end.
    """
    return replace(work, steps=max(0, work.steps - steps_done))
