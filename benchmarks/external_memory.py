"""Compare estimated memory with other laboratories' published rows: `python -m benchmarks.external_memory`.

Every row is printed. The last line is JSON: errors in percent, `within_margin` as a share of the answered rows.
"""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.external_rows import (
    Answered,
    ExternalRow,
    Unanswered,
    answer,
    by_column,
    print_rows,
    refusals,
    rows_option,
    summary,
)
from broker.estimator.memory.device_overhead import CONTEXT

INSIDE = "within_margin"


def estimated(document: Mapping[str, Any], kind: str) -> tuple[int, float]:
    """Return the estimate of a measured kind in bytes, with its margin as a fraction.

    `allocated`: torch's peak. `reserved`: the same with the allocator's cache. `nvidia-smi`, `vram`: the device's use.
    """
    if kind == "allocated":
        return document["peak_allocated_bytes"], document["margin_pct"] / 100
    context = CONTEXT if kind == "reserved" else 0
    return document["device_used_bytes"] - context, document["device_margin_pct"] / 100


def compare(row: ExternalRow) -> Answered | Unanswered:
    """Return a row with its estimate, or the reason why there is none."""
    document = answer(row)
    if isinstance(document, Unanswered):
        return document
    kind, measured = row.values["measured_kind"], float(row.values["measured_bytes"])
    size, margin = estimated(document, kind)
    inside = abs(measured - size) <= margin * size
    return Answered(row=row, what=kind, measured=measured, estimated=size, inside=inside)


def document_of(rows: list[Answered | Unanswered]) -> dict[str, Any]:
    """Return the document of the last line."""
    answered = [row for row in rows if isinstance(row, Answered)]
    if not answered:
        return {"n": 0, "median_abs_pct": None, "p90_abs_pct": None, INSIDE: None, "by_source": {}, **refusals(rows)}
    kinds = by_column(answered, "measured_kind")
    return {
        **summary(answered, INSIDE),
        "by_source": {name: summary(group, INSIDE) for name, group in by_column(answered, "source").items()},
        "by_kind": {name: summary(group, INSIDE) for name, group in kinds.items()},
        **refusals(rows),
    }


def _sizes(row: Answered) -> str:
    return f"{row.measured / 2**30:8.3f} GiB, estimated {row.estimated / 2**30:8.3f}"


def main() -> None:
    """Print every row, then one JSON line."""
    rows = [compare(row) for row in rows_option(__doc__, "external_memory.csv")]
    print_rows(rows, _sizes, "margin")
    print(json.dumps(document_of(rows)))


if __name__ == "__main__":
    main()
