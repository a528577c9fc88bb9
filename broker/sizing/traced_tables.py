"""Memory of a fine-tune of Whisper or of Stable Diffusion's UNet, from the committed tables of traces."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broker.estimator.memory import device_overhead
from broker.estimator.memory import estimate as memory_estimate
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate
from broker.estimator.memory.simulator.types import StepPeak
from broker.estimator.memory.trace_fit import by_category
from broker.model_catalog import parameter_count, trace_tables

Config = Mapping[str, Any]
NO_SPEED = "no basis: no run of such a model was measured"
MARGINS = {"whisper": 0.10, "unet": 0.25}
"""Margins for the workspaces of convolutions, in addition to the table's deviation from a trace. A Whisper has two
convolutions, a UNet many.
"""
SMALLEST, LARGEST = 64, 4096
"""Pixels of a side."""
WHICH = {"whisper": "all-linear", "unet": ",".join(trace_tables.TARGETS)}
"""Modules that a traced LoRA adapts."""


def sized(config: Config, ask: EstimateOptions, resolution: int | None) -> EstimateOptions:
    """Return the options with the size of a row: tokens that a Whisper generates, or pixels of a UNet's side.

    Raise InvalidEstimate for a size that the model does not have.
    """
    if trace_tables.kind_of(config) == "whisper":
        refuse_resolution("whisper", resolution)
        max_positions = _positive(config, "max_target_positions", 448)
        size = max_positions if ask.target is None else ask.target
        if not 1 <= size <= max_positions:
            raise InvalidEstimate(f"--target-seq {size}: must be from 1 to the model's {max_positions} positions")
        return replace(ask, length=size, target=size)
    if ask.target is not None:
        raise InvalidEstimate(f"--target-seq {ask.target}: a UNet writes no tokens; give --resolution")
    size = trace_tables.LATENT_SCALE * _positive(config, "sample_size", 64) if resolution is None else resolution
    if not SMALLEST <= size <= LARGEST or size % trace_tables.LATENT_SCALE:
        raise InvalidEstimate(
            f"--resolution {size}: must be from {SMALLEST} to {LARGEST} and divisible by {trace_tables.LATENT_SCALE}"
        )
    return replace(ask, length=size)


def _positive(config: Config, field: str, default: int) -> int:
    """Return the field as a positive integer. Raise InvalidEstimate if it is not one."""
    try:
        return parameter_count.number(config, field, default=default)
    except ValueError as e:
        raise InvalidEstimate(f"the config has {e}") from None


def refuse_resolution(family: str, resolution: int | None) -> None:
    """Raise InvalidEstimate if a resolution is given for a model that reads no latents."""
    if resolution is not None:
        raise InvalidEstimate(f"--resolution {resolution}: {family} is not a UNet; leave it out")


def estimate(config: Config, ask: EstimateOptions) -> device_overhead.Estimate:
    """Return the peak on one GPU for `sized` options. Raise InvalidEstimate if no table covers them."""
    kind = str(trace_tables.kind_of(config))
    table = trace_tables.find(config)
    if table is None:
        raise InvalidEstimate(f"no trace table matches this {kind}; known are {', '.join(trace_tables.names(kind))}")
    _check(kind, ask)
    name, tables = table
    segments = tables.get(trace_tables.key_of(ask.method, "bf16-autocast", ask.checkpointing))
    if segments is None:
        raise InvalidEstimate(f"--method {ask.method}: the tables of {name} lack it")
    sizes_of_step = trace_tables.load_of(config, ask.rows, ask.length, ask.rank)
    trained = (
        trace_tables.adapter_parameters(config, ask.rank)
        if ask.method == "lora"
        else trace_tables.trained_parameters(config)
    )
    segment_bytes = {
        n: _accumulated(categories, trained) if ask.accumulated else categories
        for n, categories in by_category(segments, sizes_of_step).items()
    }
    segment_bytes["optimizer"] = _update(
        next(iter(segment_bytes.values())), trained, foreach=ask.optimizer == "adamw_foreach"
    )
    versions = " ".join(f"{k} {v}" for k, v in trace_tables.document()["versions"].items())
    words = f"a table of traces of {name} in {versions}; convolutions' workspaces are not in it"
    played = StepPeak(
        segments={
            n: {c: categories.get(c, 0) for c in memory_estimate.CATEGORIES} for n, categories in segment_bytes.items()
        },
        trained=trained,
    )
    notes = () if ask.method == "full" else (f"the LoRA is that of the table: {WHICH[kind]}",)
    if kind == "unet":
        notes = (*notes, "the UNet alone: no autoencoder, no text encoders")
    return device_overhead.with_overhead(
        parameter_count.parameters(config), played, ("table", words, MARGINS[kind]), notes
    )


def _check(kind: str, ask: EstimateOptions) -> None:
    """Raise InvalidEstimate for options that the tables do not cover."""
    memory_estimate.check_numbers(ask)
    for option, value, allowed in (
        ("--method", ask.method, ("full", "lora")),
        ("--precision", ask.precision, ("bf16-autocast", "fp16-autocast")),
        ("--optimizer", ask.optimizer, ("adamw_fused", "adamw_foreach")),
        ("--sharding", ask.sharding, ("none",)),
        ("--attention", ask.attention, ("sdpa",)),
        ("--stack", ask.transformers, (None,)),
        (
            "--lora-targets",
            ask.targets if isinstance(ask.targets, str) else ",".join(ask.targets),
            ("all-linear", WHICH[kind]),
        ),
    ):
        if value not in allowed:
            words = " or ".join(w for w in allowed if w) or "none"
            raise InvalidEstimate(f"{option} {value}: the tables of {kind} have only {words}")


def _accumulated(by: Mapping[str, int], trained: int) -> dict[str, int]:
    """Add the gradients of earlier micro-batches, which exist from the start."""
    return {**by, "gradients": max(by.get("gradients", 0), 4 * trained)}


def _update(by: Mapping[str, int], trained: int, *, foreach: bool) -> dict[str, int]:
    """Return the optimizer's own segment. Foreach kernels hold the square roots of all second moments at once."""
    unchanged = {c: by.get(c, 0) for c in ("weights", "optimizer")}
    return {**unchanged, "gradients": 4 * trained, "temporary": 4 * trained if foreach else 0}
