"""Evidence for a memory estimate, and its margin of error."""

from typing import Literal

from broker.domain.workload import MemoryNeed, ModelShape
from broker.estimator.architecture.families import FAMILIES, PAIRS

MEASURED = frozenset({"llama", "mistral"})
"""Families with published A100 peaks to compare with."""
TRACED = frozenset(FAMILIES) | frozenset(PAIRS)
"""Families whose simulation was compared with the tracer."""
SHOWN_MORE = {"gpt_bigcode": 0.16}
"""Additional margin of nvidia-smi's figure by family. A full fine-tune of so small a model peaks in the optimizer,
which cannot reuse the memory that was cached for activations.
"""
TRACED_OPTIMIZERS = frozenset({"adamw_fused", "adamw_foreach"})
FORMULA, EXACT = 0.10, 0.05
"""Margins: FORMULA where nothing was traced, EXACT for a trace of the model's own code."""
Tier = Literal["measured", "traced", "formula", "table", "unchecked"]


def evidence_of(shape: ModelShape, *, several: bool) -> tuple[Tier, str, float]:
    """Return (tier, words, margin) by family and number of devices, for a step that matches a traced step."""
    family = shape.family
    if family not in TRACED:
        return "unchecked", f"architecture {family!r} is unknown and was estimated as a llama: probe a step first", 1.4
    if shape.experts:
        margin = 0.10 if family == "mixtral" else 0.20
        return "traced", f"{family}: experts are assumed to get equally many tokens, which is rare in training", margin
    if several:
        return "traced", f"{family}: by formulas over a trace of one GPU; not measured like this", 0.10
    return "traced", f"{family}: equals a trace of the model's own code; not measured like this", 0.05


def exact_margin(family: str, margin: float) -> float:
    """Return the margin for a trace of the model's own code. `margin`: the margin of the simulation."""
    return min(margin, EXACT if family in TRACED else FORMULA)


OOM_EXCESS = 1.1
"""A run that ran out of memory needed at least a tenth more than the device had [assumed]."""
MAX_FACTOR = 2.5
"""Largest correction factor, so that one machine's report has a limited effect. The worst known estimate was 2.3 times
too low.
"""


def shortfall(device_bytes: int, need: MemoryNeed) -> float:
    """Return the factor that makes an estimate exceed `device_bytes`, after the run ran out of memory there.

    The factor is between 1 and `MAX_FACTOR`.
    """
    peak_bytes = OOM_EXCESS * device_bytes / (1 + need.margin) - need.context
    return min(MAX_FACTOR, max(1.0, peak_bytes / need.peak))
