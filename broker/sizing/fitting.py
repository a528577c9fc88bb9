"""Search for the smallest changes with which a fine-tune fits that does not fit as requested."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from broker.domain.workload import ModelShape
from broker.estimator.memory import estimate as memory_estimate
from broker.estimator.memory.device_overhead import CONTEXT, Estimate
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate
from broker.estimator.memory.job_memory import can_shard
from broker.estimator.planning.scaling import GPUS_PER_MACHINE
from broker.estimator.speed.cards import KNOWN
from broker.estimator.speed.hardware import Hardware

MAX_GPUS = 64
"""Maximum number of GPUs of a proposal; the same as in a job's spec."""


def fits(result: Estimate, hardware: Hardware) -> bool:
    """Return True if the peak with its margin fits. Cached memory does not count: under pressure it is freed."""
    return result.peak_allocated * (1 + result.margin) + CONTEXT <= hardware.memory_bytes


def would_fit(shape: ModelShape, ask: EstimateOptions, hardware: Hardware) -> dict[str, Any] | None:
    """Return the smallest change of GPUs, sharding and recomputation that fits; None: no change fits."""
    for changed in _changes(shape, ask):
        try:
            result = memory_estimate.estimate(shape, changed)
        except InvalidEstimate:
            continue
        if fits(result, hardware):
            return {
                "gpus": changed.gpus,
                "nodes": changed.nodes,
                "sharding": changed.sharding,
                "gradient_checkpointing": changed.checkpointing,
                "device_used_bytes": result.peak_allocated + result.context,
            }
    return None


def _changes(shape: ModelShape, ask: EstimateOptions) -> Iterator[EstimateOptions]:
    """Yield options from the smallest change to the largest: recomputation, then FSDP on more and more GPUs."""
    if not ask.checkpointing:
        yield replace(ask, checkpointing=True)
    if not can_shard(shape, ask.method, ask.optimizer, ask.precision):
        return
    counts = {ask.gpus, *(2**power for power in range(1, 7))}
    for gpus in sorted(count for count in counts if max(2, ask.gpus) <= count <= max(MAX_GPUS, ask.gpus)):
        nodes = ask.nodes if gpus == ask.gpus else max(ask.nodes, gpus // GPUS_PER_MACHINE)
        for checkpointing in dict.fromkeys((ask.checkpointing, True)):
            yield replace(ask, gpus=gpus, nodes=nodes, sharding="fsdp", checkpointing=checkpointing)


Change = tuple[EstimateOptions, Hardware, str]
"""Changed options, the card, and the options of the command that are changed."""


def fitting_changes(
    shape: ModelShape, ask: EstimateOptions, hardware: Hardware, *, sequences_per_row: int = 1
) -> list[dict[str, Any]]:
    """Return one row for each kind of change: the smallest of that kind with which it fits.

    A kind that is not enough alone is tried with recomputation too. The sequences of a row stay together.
    """
    rows = []
    for kind, changes in KINDS.items():
        for more in (False,) if ask.checkpointing or kind == "recomputation" else (False, True):
            base = replace(ask, checkpointing=ask.checkpointing or more)
            fitting = _first_fitting(shape, changes(shape, base, hardware, sequences_per_row))
            if fitting is not None:
                (_, card, words), result = fitting
                rows.append({
                    "change": kind,
                    "options": f"{words}{' --gradient-checkpointing' if more else ''}",
                    "device_used_bytes": result.peak_allocated + result.context,
                    "gpu": card.name,
                })  # fmt: skip
                break
    return rows


def _first_fitting(shape: ModelShape, changes: Iterator[Change]) -> tuple[Change, Estimate] | None:
    """Return the first change that fits, with its estimate."""
    for change in changes:
        try:
            result = memory_estimate.estimate(shape, change[0])
        except InvalidEstimate:
            continue
        if fits(result, change[1]):
            return change, result
    return None


def _recomputed(_: ModelShape, ask: EstimateOptions, card: Hardware, sequences_per_row: int) -> Iterator[Change]:
    if not ask.checkpointing:
        yield replace(ask, checkpointing=True), card, "--gradient-checkpointing"


def _smaller_batches(_: ModelShape, ask: EstimateOptions, card: Hardware, sequences_per_row: int) -> Iterator[Change]:
    """Yield at most 20 smaller micro-batches, each half of the one before; the global batch is accumulated."""
    rows = ask.rows // sequences_per_row // 2
    while rows:
        yield replace(ask, rows=rows * sequences_per_row, accumulated=True), card, f"--micro-batch {rows} --accumulate"
        rows //= 2


def _sharded(shape: ModelShape, ask: EstimateOptions, card: Hardware, sequences_per_row: int) -> Iterator[Change]:
    if ask.gpus > 1 and ask.sharding in ("none", "ddp") and _can_shard(shape, ask):
        yield replace(ask, sharding="fsdp"), card, "--sharding fsdp"


def _lighter_methods(
    shape: ModelShape, ask: EstimateOptions, card: Hardware, sequences_per_row: int
) -> Iterator[Change]:
    """Yield the methods that need less. No trainer quantises a mixture, whose experts are one tensor."""
    lighter = {"full": ("lora", "qlora"), "lora": ("qlora",), "lora8": ("qlora",)}.get(ask.method, ())
    for method in lighter:
        if method == "lora" or (not shape.experts and ask.precision != "fp32"):
            yield replace(ask, method=method), card, f"--method {method}"  # type: ignore[arg-type]


def _more_gpus(shape: ModelShape, ask: EstimateOptions, card: Hardware, sequences_per_row: int) -> Iterator[Change]:
    if not _can_shard(shape, ask):
        return
    for gpus in (2**power for power in range(1, 7)):
        if gpus > ask.gpus:
            nodes = max(ask.nodes, gpus // GPUS_PER_MACHINE)
            words = f"--gpus {gpus}{f' --nodes {nodes}' if nodes > 1 else ''} --sharding fsdp"
            yield replace(ask, gpus=gpus, nodes=nodes, sharding="fsdp"), card, words


def _larger_cards(_: ModelShape, ask: EstimateOptions, card: Hardware, sequences_per_row: int) -> Iterator[Change]:
    """Yield cards with more memory, the smallest first, that compute in the precision."""
    larger = (h for h in KNOWN.values() if h.gpu and h.memory_bytes > card.memory_bytes)
    for other in sorted(larger, key=lambda h: h.memory_bytes):
        if other.bf16 or not ask.precision.startswith("bf16"):
            yield ask, other, f"--gpu {other.name}"


def _can_shard(shape: ModelShape, ask: EstimateOptions) -> bool:
    return can_shard(shape, ask.method, ask.optimizer, ask.precision)


KINDS: dict[str, Callable[[ModelShape, EstimateOptions, Hardware, int], Iterator[Change]]] = {
    "recomputation": _recomputed,
    "sharding": _sharded,
    "micro-batch": _smaller_batches,
    "method": _lighter_methods,
    "GPUs": _more_gpus,
    "card": _larger_cards,
}
"""Kinds of change, those that cost the least first."""
