"""Memory of models that have no closed form, from the coefficients of traces.

Within one segment of a step a category's bytes are a constant, plus so many for each row, plus so many for each row and
what it has of a size (tokens that are written, pixels of the latents); a LoRA's rank adds to the constant, or to what
all tokens of a row take. The peak is that of the worst segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RANK = 16
"""That of the traces; others are so many more or fewer."""
Segments = Mapping[str, Mapping[str, Sequence[float]]]
"""By segment and category: constant, by row, by row and size, and for each rank more: constant, by row and spread."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """What the traced step has of the things that bytes follow from."""

    rows: int
    size: int
    """Of one row: what the second coefficient is for."""
    spread: int
    """Of one row: all that adapters see, tokens or pixels."""
    rank: int = RANK


def _value(line: Sequence[float], load: TracedStep) -> int:
    factors = 1, load.rows, load.rows * load.size, load.rank - RANK, (load.rank - RANK) * load.rows * load.spread
    return max(0, round(sum(c * f for c, f in zip(line, factors, strict=False))))


def by_category(segments: Segments, load: TracedStep) -> dict[str, dict[str, int]]:
    """Bytes of every segment."""
    return {name: {c: _value(line, load) for c, line in by.items()} for name, by in segments.items()}
