"""Calibrate the intervals of `gpubroker estimate` over groups of published rows; `external_throughput` prints them.

A group is a laboratory with its code base. Each calibrating group has the same weight, however many rows it has
(Dunn, Wasserman and Ramdas 2022, arXiv 1809.07441). A width is judged by the group that it was calibrated without.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

COVERAGE = 0.9
FITTED_GROUP = "fms transformers"
"""Group whose laboratory also published rows of the fit. It is judged, but it calibrates no width."""


@dataclass(frozen=True, kw_only=True)
class GroupedError:
    """One row. `near`: runs of its family on its GPU were fitted; `least`: the width that other causes require."""

    group: str
    near: bool
    error: float
    """Absolute logarithm of estimated over measured tokens/s."""
    least: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupWidths:
    """Factors of the intervals, by whether the nearest evidence is the same GPU and family."""

    near: float
    far: float

    def of(self, row: GroupedError) -> float:
        """Return the factor for a row."""
        return max(self.near if row.near else self.far, row.least)


def group_of(source: str) -> str:
    """Return the laboratory and code base of a source. Versions of transformers are one code base."""
    return FITTED_GROUP if source.startswith("fms 4") else source


def quantile_over_groups(rows: Sequence[GroupedError], coverage: float = COVERAGE) -> float:
    """Return the smallest error that this share of rows does not exceed, with equal weights of the groups."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.group] = sizes.get(row.group, 0) + 1
    held, ordered = 0.0, sorted(rows, key=lambda row: row.error)
    for row in ordered:
        held += 1 / sizes[row.group] / len(sizes)
        if held >= coverage - 1e-9:
            break
    return row.error


def widest_quantile(rows: Sequence[GroupedError], coverage: float = COVERAGE) -> float:
    """Return the largest quantile of any group's errors, for the few groups of one way to run."""
    groups = {row.group for row in rows}
    return max(quantile_over_groups([row for row in rows if row.group == group], coverage) for group in groups)


def held_without_group(rows: Sequence[GroupedError]) -> float:
    """Return the share of rows in the interval that the other groups make by `widest_quantile`."""
    held = 0
    for group in {row.group for row in rows}:
        width = widest_quantile([row for row in rows if row.group != group])
        held += sum(row.error <= width for row in rows if row.group == group)
    return held / len(rows)


def group_widths(rows: Sequence[GroupedError]) -> GroupWidths | None:
    """Return the widths by the calibrating groups of `rows`, or None without such rows.

    Rows with near evidence must not widen their interval beyond that of all rows, nor other rows narrow theirs.
    """
    used = [row for row in rows if row.group != FITTED_GROUP]
    near = [row for row in used if row.near]
    if not used:
        return None
    every = quantile_over_groups(used)
    nearby = quantile_over_groups(near) if near else every
    return GroupWidths(near=math.exp(min(nearby, every)), far=math.exp(max(nearby, every)))


def unseen_groups(rows: Sequence[GroupedError]) -> dict[str, dict[str, float | int]]:
    """Return coverage and median width of each group, by widths of the other groups; `all` has those of all rows."""
    judged: dict[str, list[tuple[bool, float]]] = {}
    for group in sorted({row.group for row in rows}):
        widths = group_widths([row for row in rows if row.group != group])
        if widths is not None:
            own = [row for row in rows if row.group == group]
            judged[group] = [(row.error <= math.log(widths.of(row)), widths.of(row)) for row in own]
    judged["all"] = [one for own in judged.values() for one in own]
    return {
        name: {
            "n": len(own),
            "coverage_90": round(statistics.fmean(inside for inside, _ in own), 3),
            "median_width": round(statistics.median(width for _, width in own), 3),
        }
        for name, own in judged.items()
        if own
    }
