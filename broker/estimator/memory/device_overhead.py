"""What nvidia-smi shows of a step: the tape's peak, and what CUDA, cuBLAS and the allocator take besides."""

from collections.abc import Mapping
from dataclasses import dataclass

from broker.domain.offer import GIB
from broker.estimator.memory.evidence import Tier
from broker.estimator.memory.simulator.types import StepPeak

CONTEXT = GIB // 2
"""A process's CUDA context with its loaded kernels [assumed]."""
CUBLAS_WORKSPACE, STACK_WORKSPACE = 2 * 32 * 2**20, 2 * 8_519_680
"""Of the forward and the backward thread, counted as allocated: as the trainer's worker sets it, and torch's default
below Hopper."""
FRAGMENTS_ONE, FRAGMENTS_MANY = 0.28, 0.42
"""What the caching allocator holds besides, as a share of all that comes and goes within a step. Medians of the 22
one-GPU rows (0.11 to 0.37) and the 26 two-GPU rows (0.22 to 1.3) of fms-acceleration (`benchmarks.shown_table`)."""
SHOWN_ONE, SHOWN_MANY = 0.07, 0.29
"""How much wider the margin of nvidia-smi's figure is: the worst row, predicted by the shares of other models and
methods, was short by 9.5 % on one GPU and by 33 % on two, where the allocator could not use again for the optimizer
what it had cached for activations."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one device. `margin`: share that the peak may be higher by, on this evidence."""

    by_category: Mapping[str, int]
    segment: str
    peak_allocated: int
    device_used: int
    """As nvidia-smi shows: with the context and what the allocator holds besides."""
    context: int
    """Context and fragmentation: the difference of the two."""
    workspace: int
    """cuBLAS's, which is counted among what is temporary."""
    tier: Tier
    evidence: str
    margin: float
    device_margin: float
    """The same for what nvidia-smi shows."""
    notes: tuple[str, ...]
    parameters: int
    trainable: int


def made(
    parameters: int,
    played: StepPeak,
    evidence: tuple[Tier, str, float],
    notes: tuple[str, ...],
    *,
    several: bool = False,
    workspace: int = CUBLAS_WORKSPACE,
) -> Estimate:
    """With what torch and the allocator take besides. `evidence`: tier, words, margin; `several`: devices."""
    tier, words, margin = evidence
    by = {str(c): size for c, size in played.segments[played.worst].items()}
    by.setdefault("communication", 0)
    by["temporary"] += workspace
    peak = sum(by.values())
    share = FRAGMENTS_MANY if several else FRAGMENTS_ONE
    fragments = int(share * (peak - by["weights"] - by["optimizer"]))
    context = CONTEXT + fragments
    return Estimate(
        by_category={**by, "context": context},
        segment=played.worst,
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
        trainable=played.trained,
    )
