"""Scaling tables: `gpubroker estimate --what-if` offline, `gpubroker quote --what-if` for quoted offers."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import ATTENTION_ROLES, family_spec
from broker.estimator.memory import estimate
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate
from broker.estimator.planning.scaling import GPUS_PER_MACHINE, Point, TrainingLoad, counts_of, scaling
from broker.estimator.speed.cards import no_speed
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.throughput import for_other_code
from broker.estimator.workload import optimizer_of
from broker.model_catalog import trace_tables
from broker.sizing import traced_tables
from broker.sizing.estimate import EstimateError, config_of, hardware_of, links, model_shape, speed_fields
from broker.sizing.hf_aliases import unquantised
from trainer.contract.architectures import is_mixture
from trainer.contract.train import TrainConfig

MAX_BATCH, MAX_ROWS, MAX_USD = 10**9, 10**15, 10**6
"""Largest values that are accepted offline."""


def what_if(
    counts_text: str,
    *,
    model: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    gpu: str | None,
    ask: EstimateOptions,
    global_batch: int | None = None,
    rows: int | None = None,
    usd_per_gpu_hour: float | None = None,
) -> dict[str, Any]:
    """Return a row for each count in `counts_text` (`gpus=1,2,4,…,512`).

    Raise EstimateError with one line.

    `global_batch`: rows of a step; by default the largest number of GPUs times `ask.rows`. `rows`: number of rows of
    the data set, for the hours and dollars of one epoch; None: the table has neither.
    """
    name, config_json = config_of(model, config)
    config_json, _ = unquantised(config_json, ask.method)
    if trace_tables.kind_of(config_json) is not None:
        raise EstimateError(f"--what-if: {traced_tables.NO_SPEED}; leave it out for its memory")
    hardware = hardware_of(gpu)
    if hardware is None:
        raise EstimateError("--what-if: give --gpu, for example --gpu H100-SXM")
    counts = _counts(counts_text)
    _check(ask, config_json, global_batch, rows, usd_per_gpu_hour)
    batch = counts[-1] * ask.rows if global_batch is None else global_batch
    shape = model_shape(name, config_json)
    load = TrainingLoad(
        global_batch=batch,
        tokens_per_row=ask.length,
        target_tokens_per_row=(ask.target or ask.length) if shape.decoder_layers else 0.0,
        steps=0 if rows is None else math.ceil(rows / batch),
        usd_per_gpu_hour=usd_per_gpu_hour,
    )
    return table(name, shape, ask, hardware, counts, load)


def _check(
    ask: EstimateOptions,
    config_json: Mapping[str, Any],
    global_batch: int | None,
    rows: int | None,
    usd_per_gpu_hour: float | None,
) -> None:
    """Raise EstimateError if a number is out of range, or if the method is not for the model."""
    try:
        estimate.check_numbers(ask)
        estimate.check_experts(ask, mixture=is_mixture(config_json))
    except InvalidEstimate as e:
        raise EstimateError(str(e)) from None
    for option, value, maximum in (("--global-batch", global_batch, MAX_BATCH), ("--rows", rows, MAX_ROWS)):
        if value is not None and not 1 <= value <= maximum:
            raise EstimateError(f"{option} {value}: must be from 1 to {maximum}")
    if usd_per_gpu_hour is not None and not 0 <= usd_per_gpu_hour <= MAX_USD:
        raise EstimateError(f"--usd-per-gpu-hour {usd_per_gpu_hour:g}: must be from 0 to {MAX_USD}")


def what_if_of_spec(
    counts_text: str, train: TrainConfig, shape: ModelShape, hardware: Hardware, *, mean_tokens: float, steps: int,
    usd_per_gpu_hour: float | None, generated_tokens: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the scaling table of a spec's job.

    Raise EstimateError.

    `mean_tokens`: mean tokens of its rows; the longest may have `max_length`.
    `generated_tokens`: mean tokens that an encoder-decoder generates for a row.
    """
    lora = train.adapters
    if lora and lora.dora:
        raise EstimateError("--what-if: DoRA is not estimated; leave train.method.dora out")
    ask = EstimateOptions(
        method="lora8" if train.quantised and train.quantised.bits == 8 else train.method.kind,
        optimizer=optimizer_of(train),
        attention="sdpa" if train.attention == "auto" else train.attention,
        precision={"fp16": "fp16-autocast", "fp32": "fp32"}.get(train.precision, "bf16-autocast"),  # type: ignore[arg-type]
        length=train.max_length,
        rank=lora.r if lora else 1,
        targets=_targets(train, shape),
        dropout=lora.dropout if lora else 0.0,
    )
    load = TrainingLoad(
        global_batch=train.global_batch_rows,
        tokens_per_row=min(mean_tokens, ask.length),
        target_tokens_per_row=min(generated_tokens, ask.length),
        steps=steps,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )
    return table(shape.name, shape, ask, hardware, _counts(counts_text), load)


def _targets(train: TrainConfig, shape: ModelShape) -> tuple[str, ...]:
    if train.adapters is None or train.adapters.targets == "all-linear":
        return ("all-linear",)
    if train.adapters.targets != "attention":
        return train.adapters.targets
    return tuple(name for role, name in family_spec(shape).names.items() if role in ATTENTION_ROLES)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return counts_of(text)
    except ValueError as e:
        raise EstimateError(str(e)) from None


def table(
    name: str,
    shape: ModelShape,
    ask: EstimateOptions,
    hardware: Hardware,
    counts: tuple[int, ...],
    load: TrainingLoad,
) -> dict[str, Any]:
    """Return the printed document. Raise EstimateError."""
    if (why := no_speed(hardware, ask.precision)) is not None:
        raise EstimateError(f"--gpu {hardware.name}: {why}")
    try:
        points = scaling(shape, ask, hardware, counts, load)
    except InvalidEstimate as e:
        raise EstimateError(str(e)) from None
    return {
        "model": name,
        "gpu": hardware.name,
        "gpu_memory_bytes": hardware.memory_bytes,
        "method": ask.method,
        "global_batch": load.global_batch,
        "tokens_per_row": load.tokens_per_row + load.target_tokens_per_row,
        "steps": load.steps,
        "usd_per_gpu_hour": load.usd_per_gpu_hour,
        "points": [_row(point, timed=load.steps > 0) for point in points],
        "assumptions": [
            links(hardware, GPUS_PER_MACHINE),
            f"the global batch stays {load.global_batch} rows; GPUs without an equal share of it stay idle",
            "training alone: no set-up, checkpoints, evaluation or preemptions",
        ],
    }


def _row(point: Point, *, timed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "gpus": point.gpus,
        "nodes": point.nodes,
        "need_bytes": point.need_bytes,
        "memory_bytes": {name: size for name, size in point.memory.items() if size},
    }
    if point.plan is None or point.speed is None:
        unknown = dict.fromkeys(("plan", "step_s", "mfu", "hours", "usd"))
        return {**row, **unknown, **speed_fields("does not fit")}
    return {
        **row,
        "plan": asdict(point.plan),
        "step_s": point.speed.step_s,
        **speed_fields(for_other_code(point.speed)),
        "mfu": round(point.mfu, 4),
        "hours": point.hours if timed else None,
        "usd": point.usd if timed else None,
    }
