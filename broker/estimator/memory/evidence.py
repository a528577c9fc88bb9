"""On what evidence a step's memory is known, and how far it may be off."""

from typing import Literal

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import FAMILIES, PAIRS

MEASURED = frozenset({"llama", "mistral"})
"""Families with published A100 peaks to compare with."""
TRACED = frozenset(FAMILIES) | frozenset(PAIRS)
"""Families whose closed form was compared with the tracer."""
SHOWN_MORE = {"gpt_bigcode": 0.16}
"""Families of which nvidia-smi showed more beside the peak than of others, and how much wider its margin is: full
fine-tunes of so small a model peak in the optimizer, which cannot use what was cached for activations."""
TRACED_OPTIMIZERS = frozenset({"adamw_fused", "adamw_foreach"})
FORMULA, EXACT = 0.10, 0.05
"""Margins: where nothing was traced, and of a trace of the model's own code."""
Tier = Literal["measured", "traced", "formula", "table", "unchecked"]


def evidence_of(shape: ModelShape, *, several: bool) -> tuple[Tier, str, float]:
    """(tier, words, margin) of a step that equals a trace of it, for the family and the number of devices."""
    family = shape.family
    if family not in TRACED:
        return "unchecked", f"architecture {family!r} is unknown and was taken for a llama: probe a step first", 1.4
    if shape.experts:
        margin = 0.10 if family == "mixtral" else 0.20
        return "traced", f"{family}: experts are taken to get equally many tokens, as training seldom does", margin
    if several:
        return "traced", f"{family}: by formulas over a trace of one GPU; not measured like this", 0.10
    return "traced", f"{family}: equals a trace of the model's own code; not measured like this", 0.05


def exact_margin(family: str, margin: float) -> float:
    """Of a trace of the model's own code. `margin`: of the closed form."""
    return min(margin, EXACT if family in TRACED else FORMULA)
