"""Scaling tables: `gpubroker estimate --what-if` offline, `gpubroker quote --what-if` over what was quoted."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from broker.decide import estimate as sizes
from broker.decide.hardware import Hardware
from broker.decide.memory_builds import ATTENTION_ROLES, build_of
from broker.decide.scaling import A_MACHINE, Load, Point, counts_of, scaling
from broker.decide.workload import optimizer_of
from broker.domain.workload import ModelShape
from broker.sizing import BadAsk, config_of, hardware_of, model_shape
from trainer.contract.train import TrainConfig


def what_if(
    said: str,
    *,
    model: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    gpu: str | None,
    ask: sizes.Ask,
    global_batch: int | None = None,
    rows: int | None = None,
    usd_per_gpu_hour: float | None = None,
) -> dict[str, Any]:
    """A row for each count in `said` (`gpus=1,2,4,…,512`). Raises BadAsk with one line.

    `global_batch`: rows a step; by default as many as the most GPUs, times `ask.rows`. `rows`: of the data set, for
    hours and dollars of one pass.
    """
    name, given = config_of(model, config)
    hardware = hardware_of(gpu)
    if hardware is None:
        raise BadAsk("--what-if: give --gpu, for example --gpu H100-SXM")
    counts = _counts(said)
    batch = counts[-1] * ask.rows if global_batch is None else global_batch
    for option, value in (("--global-batch", batch), ("--rows", 1 if rows is None else rows)):
        if value < 1:
            raise BadAsk(f"{option} {value}: must be at least 1")
    if usd_per_gpu_hour is not None and not 0 <= usd_per_gpu_hour < math.inf:
        raise BadAsk(f"--usd-per-gpu-hour {usd_per_gpu_hour:g}: must be 0 or more")
    shape = model_shape(name, given)
    load = Load(
        global_batch=batch,
        tokens_per_row=ask.length,
        written_per_row=(ask.target or ask.length) if shape.decoder_layers else 0.0,
        steps=0 if rows is None else math.ceil(rows / batch),
        usd_per_gpu_hour=usd_per_gpu_hour,
    )
    return table(name, shape, ask, hardware, counts, load)


def of_spec(
    said: str, train: TrainConfig, shape: ModelShape, hardware: Hardware, *, mean: float, steps: int,
    usd_per_gpu_hour: float | None, written: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The same for a spec's job; `mean`: tokens of its rows, of which some may have all `max_length`; `written`: those
    that an encoder-decoder writes for one. Raises BadAsk."""
    lora = train.adapters
    if lora and lora.dora:
        raise BadAsk("--what-if: DoRA is not estimated; leave train.method.dora out")
    ask = sizes.Ask(
        method="lora8" if train.quantised and train.quantised.bits == 8 else train.method.kind,
        optimizer=optimizer_of(train),
        attention="sdpa" if train.attention == "auto" else train.attention,
        precision={"fp16": "fp16-autocast", "fp32": "fp32"}.get(train.precision, "bf16-autocast"),  # type: ignore[arg-type]
        length=train.max_length,
        rank=lora.r if lora else 1,
        targets=_targets(train, shape),
        dropout=lora.dropout if lora else 0.0,
    )
    load = Load(
        global_batch=train.global_batch,
        tokens_per_row=min(mean, ask.length),
        written_per_row=min(written, ask.length),
        steps=steps,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )
    return table(shape.name, shape, ask, hardware, _counts(said), load)


def _targets(train: TrainConfig, shape: ModelShape) -> tuple[str, ...]:
    if train.adapters is None or train.adapters.targets == "all-linear":
        return ("all-linear",)
    if train.adapters.targets != "attention":
        return train.adapters.targets
    return tuple(name for role, name in build_of(shape).names.items() if role in ATTENTION_ROLES)


def _counts(said: str) -> tuple[int, ...]:
    try:
        return counts_of(said)
    except ValueError as e:
        raise BadAsk(str(e)) from None


def table(
    name: str, shape: ModelShape, ask: sizes.Ask, hardware: Hardware, counts: tuple[int, ...], load: Load
) -> dict[str, Any]:
    """The document that is printed. Raises BadAsk."""
    try:
        points = scaling(shape, ask, hardware, counts, load)
    except sizes.Unanswerable as e:
        raise BadAsk(str(e)) from None
    return {
        "model": name,
        "gpu": hardware.name,
        "method": ask.method,
        "global_batch": load.global_batch,
        "tokens_per_row": load.tokens_per_row + load.written_per_row,
        "steps": load.steps,
        "usd_per_gpu_hour": load.usd_per_gpu_hour,
        "points": [_row(point, timed=load.steps > 0) for point in points],
        "assumptions": [
            f"machines of {A_MACHINE} GPUs; within them {hardware.link / 1e9:.0f} GB/s a GPU and direction, "
            f"between them {hardware.network / 1e9:.1f} GB/s a machine",
            f"the global batch stays {load.global_batch} rows; GPUs that it does not divide among stay idle",
            "training alone: no set-up, checkpoints, evaluation or preemptions",
        ],
    }


def _row(point: Point, *, timed: bool) -> dict[str, Any]:
    row = asdict(replace(point, plan=None))
    row["plan"] = None if point.plan is None else asdict(point.plan)
    row["tokens_per_s_interval"] = [round(row.pop("low"), 1), round(row.pop("high"), 1)]
    row["tokens_per_s"], row["mfu"] = round(point.tokens_per_s, 1), round(point.mfu, 4)
    return row if timed else {**row, "hours": None, "usd": None}
