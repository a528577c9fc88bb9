"""Device memory as nvidia-smi shows it: the simulated peak plus overhead of CUDA, cuBLAS and the allocator."""

from collections.abc import Mapping
from dataclasses import dataclass

from broker.domain.offer import GIB
from broker.estimator.memory.evidence import Tier
from broker.estimator.memory.simulator.types import StepPeak

CONTEXT = GIB // 2
"""Bytes of a process's CUDA context with its loaded kernels [assumed]."""
CUBLAS_WORKSPACE, STACK_WORKSPACE = 2 * 32 * 2**20, 2 * 8_519_680
"""Bytes of the cuBLAS workspaces of the forward and the backward thread, counted as allocated. The first is the size
that the trainer's worker sets, the second is torch's default below Hopper.
"""
FRAGMENTS_ONE, FRAGMENTS_MANY = 0.28, 0.42
"""Fragmentation of the caching allocator, as a share of all bytes that are allocated and freed within a step. Medians
of the 22 one-GPU rows (0.11 to 0.37) and the 26 two-GPU rows (0.22 to 1.3) of fms-acceleration
(`benchmarks.shown_table`).
"""
SHOWN_ONE, SHOWN_MANY = 0.07, 0.29
"""Additional margin of nvidia-smi's figure. The worst row, predicted by the shares of other models and methods, was
short by 9.5 % on one GPU and by 33 % on two. There the allocator could not reuse for the optimizer what it had
cached for activations.
"""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of one device in bytes. `margin`: share by which the peak may be higher, on this evidence."""

    by_category: Mapping[str, int]
    segment: str
    peak_allocated: int
    device_used: int
    """Bytes as nvidia-smi shows them: with the context and the allocator's cached memory."""
    context: int
    """Bytes of context and fragmentation: `device_used` minus `peak_allocated`."""
    workspace: int
    """Bytes of cuBLAS workspaces, which are included in the temporary bytes."""
    tier: Tier
    evidence: str
    margin: float
    device_margin: float
    """Margin of `device_used`."""
    notes: tuple[str, ...]
    parameters: int
    trainable: int


def with_overhead(
    parameters: int,
    step_peak: StepPeak,
    evidence: tuple[Tier, str, float],
    notes: tuple[str, ...],
    *,
    several: bool = False,
    workspace: int = CUBLAS_WORKSPACE,
) -> Estimate:
    """Return the estimate with the overhead of torch and the allocator.

    `evidence`: tier, words, margin; `several`: the step runs on several devices.
    """
    tier, words, margin = evidence
    by = {str(c): size for c, size in step_peak.segments[step_peak.worst].items()}
    by.setdefault("communication", 0)
    by["temporary"] += workspace
    peak = sum(by.values())
    share = FRAGMENTS_MANY if several else FRAGMENTS_ONE
    fragments = int(share * (peak - by["weights"] - by["optimizer"]))
    context = CONTEXT + fragments
    return Estimate(
        by_category={**by, "context": context},
        segment=step_peak.worst,
        peak_allocated=peak,
        device_used=peak + context,
        context=context,
        workspace=workspace,
        tier=tier,
        evidence=words,
        margin=margin,
        device_margin=margin + (SHOWN_MANY if share == FRAGMENTS_MANY else SHOWN_ONE),
        notes=notes,
        parameters=parameters,
        trainable=step_peak.trained,
    )
