"""Search for the fewest GPUs, with FSDP, for a fine-tune that does not fit as requested."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from broker.domain.workload import ModelShape
from broker.estimator.memory import estimate as memory_estimate
from broker.estimator.memory.device_overhead import CONTEXT, Estimate
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate
from broker.estimator.memory.job_memory import can_shard
from broker.estimator.planning.scaling import A_MACHINE
from broker.estimator.speed.hardware import Hardware

MOST_GPUS = 64
"""GPUs beyond which none is proposed: the most that a job's spec allows."""


def fits(result: Estimate, hardware: Hardware) -> bool:
    """Return True if the peak with its margin fits. Cached memory does not count: under pressure it is freed."""
    return result.peak_allocated * (1 + result.margin) + CONTEXT <= hardware.memory_bytes


def would_fit(shape: ModelShape, ask: EstimateOptions, hardware: Hardware) -> dict[str, Any] | None:
    """Return the smallest change of GPUs, sharding and recomputation with which it fits; None: there is none."""
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
    for gpus in sorted(count for count in counts if max(2, ask.gpus) <= count <= max(MOST_GPUS, ask.gpus)):
        nodes = ask.nodes if gpus == ask.gpus else max(ask.nodes, gpus // A_MACHINE)
        for checkpointing in dict.fromkeys((ask.checkpointing, True)):
            yield replace(ask, gpus=gpus, nodes=nodes, sharding="fsdp", checkpointing=checkpointing)
