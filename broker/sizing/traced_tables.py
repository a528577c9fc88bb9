"""Memory of a fine-tune of Whisper or of Stable Diffusion's UNet, from the committed tables of traces."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broker.estimator.memory import device_overhead as shown
from broker.estimator.memory import estimate as sizes
from broker.estimator.memory.simulator.types import StepPeak
from broker.estimator.memory.trace_fit import by_category
from broker.model_catalog import parameter_count as count
from broker.model_catalog import trace_tables as traced

Config = Mapping[str, Any]
NO_SPEED = "no basis: no run of such a model was measured"
MARGINS = {"whisper": 0.10, "unet": 0.25}
"""Margins for the workspaces of convolutions, in addition to the table's deviation from a trace. A Whisper has two
convolutions, a UNet many.
"""
SMALLEST, LARGEST = 64, 4096
"""Pixels of a side."""
WHICH = {"whisper": "all-linear", "unet": ",".join(traced.TARGETS)}
"""Modules that a traced LoRA adapts."""


def sized(config: Config, ask: sizes.EstimateOptions, resolution: int | None) -> sizes.EstimateOptions:
    """Return the options with the size of a row: tokens that a Whisper generates, or pixels of a UNet's side.

    Raise InvalidEstimate for a size that the model does not have.
    """
    if traced.kind_of(config) == "whisper":
        refuse_resolution("whisper", resolution)
        most = _positive(config, "max_target_positions", 448)
        size = most if ask.target is None else ask.target
        if not 1 <= size <= most:
            raise sizes.InvalidEstimate(f"--target-seq {size}: must be from 1 to the model's {most} positions")
        return replace(ask, length=size, target=size)
    if ask.target is not None:
        raise sizes.InvalidEstimate(f"--target-seq {ask.target}: a UNet writes no tokens; give --resolution")
    size = traced.SHRUNK * _positive(config, "sample_size", 64) if resolution is None else resolution
    if not SMALLEST <= size <= LARGEST or size % traced.SHRUNK:
        raise sizes.InvalidEstimate(
            f"--resolution {size}: must be from {SMALLEST} to {LARGEST} and divisible by {traced.SHRUNK}"
        )
    return replace(ask, length=size)


def _positive(config: Config, field: str, default: int) -> int:
    """Return the field as a positive integer. Raise InvalidEstimate if it is not one."""
    try:
        return count.number(config, field, default=default)
    except ValueError as e:
        raise sizes.InvalidEstimate(f"the config has {e}") from None


def refuse_resolution(family: str, resolution: int | None) -> None:
    """Raise InvalidEstimate if a resolution is given for a model that reads no latents."""
    if resolution is not None:
        raise sizes.InvalidEstimate(f"--resolution {resolution}: {family} is not a UNet; leave it out")


def estimate(config: Config, ask: sizes.EstimateOptions) -> shown.Estimate:
    """Return the peak on one GPU for `sized` options. Raise InvalidEstimate if no table covers them."""
    kind = str(traced.kind_of(config))
    table = traced.find(config)
    if table is None:
        raise sizes.InvalidEstimate(f"no trace table matches this {kind}; known are {', '.join(traced.names(kind))}")
    _check(kind, ask)
    name, tables = table
    segments = tables.get(traced.key_of(ask.method, "bf16-autocast", ask.checkpointing))
    if segments is None:
        raise sizes.InvalidEstimate(f"--method {ask.method}: the tables of {name} lack it")
    sizes_of_step = traced.load_of(config, ask.rows, ask.length, ask.rank)
    trained = traced.adapter_parameters(config, ask.rank) if ask.method == "lora" else traced.trained_parameters(config)
    segment_bytes = {
        n: _accumulated(categories, trained) if ask.accumulated else categories
        for n, categories in by_category(segments, sizes_of_step).items()
    }
    segment_bytes["optimizer"] = _update(
        next(iter(segment_bytes.values())), trained, foreach=ask.optimizer == "adamw_foreach"
    )
    versions = " ".join(f"{k} {v}" for k, v in traced.document()["versions"].items())
    words = f"a table of traces of {name} in {versions}; convolutions' workspaces are not in it"
    played = StepPeak(
        segments={n: {c: categories.get(c, 0) for c in sizes.CATEGORIES} for n, categories in segment_bytes.items()},
        trained=trained,
    )
    notes = () if ask.method == "full" else (f"the LoRA is that of the table: {WHICH[kind]}",)
    if kind == "unet":
        notes = (*notes, "the UNet alone: no autoencoder, no text encoders")
    return shown.made(count.parameters(config), played, ("table", words, MARGINS[kind]), notes)


def _check(kind: str, ask: sizes.EstimateOptions) -> None:
    """Raise InvalidEstimate for options that the tables do not cover."""
    sizes.check_numbers(ask)
    for option, given, known in (
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
        if given not in known:
            words = " or ".join(w for w in known if w) or "none"
            raise sizes.InvalidEstimate(f"{option} {given}: the tables of {kind} have only {words}")


def _accumulated(by: Mapping[str, int], trained: int) -> dict[str, int]:
    """Add the gradients of earlier micro-batches, which exist from the start."""
    return {**by, "gradients": max(by.get("gradients", 0), 4 * trained)}


def _update(by: Mapping[str, int], trained: int, *, foreach: bool) -> dict[str, int]:
    """Return the optimizer's own segment. The foreach kernels make the roots of all second moments at once."""
    unchanged = {c: by.get(c, 0) for c in ("weights", "optimizer")}
    return {**unchanged, "gradients": 4 * trained, "temporary": 4 * trained if foreach else 0}
