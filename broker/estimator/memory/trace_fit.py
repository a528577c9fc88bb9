"""Memory of models without a simulator, from coefficients that were fitted to traces.

Within a segment of a step, the bytes of a category are linear: a constant, a part per row, a part per row and size. The
size is the number of generated tokens, or of pixels of the latents. The rank of a LoRA adds to the constant, or to the
part for all tokens of a row. The peak is the peak of the worst segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RANK = 16
"""LoRA rank of the traces; the coefficients are for the difference from it."""
Segments = Mapping[str, Mapping[str, Sequence[float]]]
"""Coefficients by segment and category: constant, per row, per row and size, then per additional rank: constant, per
row and spread.
"""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """Sizes of the step that the coefficients are multiplied by."""

    rows: int
    size: int
    """Tokens or pixels of one row that the third coefficient is multiplied by."""
    spread: int
    """Tokens or pixels of one row that pass through adapters."""
    rank: int = RANK


def _value(line: Sequence[float], load: TracedStep) -> int:
    factors = 1, load.rows, load.rows * load.size, load.rank - RANK, (load.rank - RANK) * load.rows * load.spread
    return max(0, round(sum(c * f for c, f in zip(line, factors, strict=False))))


def by_category(segments: Segments, load: TracedStep) -> dict[str, dict[str, int]]:
    """Return the bytes of every segment by category."""
    return {name: {c: _value(line, load) for c, line in by.items()} for name, by in segments.items()}
