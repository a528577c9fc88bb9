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
from broker.estimator.memory.recipes import RecipeName

INSIDE = "within_margin"
RECIPE_OF: tuple[tuple[str, RecipeName], ...] = (
    ("foak", "fms-foak"),
    ("fms", "hf-trainer"),
    ("PowerLM", "hf-trainer"),
    ("LitGPT", "litgpt"),
    ("torchtune", "torchtune"),
    ("can-i-finetune-this", "peft-kbit"),
    ("ms-swift", "hf-trainer"),
    ("Qwen", "hf-trainer"),
)
"""Recipe by a word of the row's source: the library that the source states. The first match applies."""


def estimated(document: Mapping[str, Any], kind: str) -> tuple[int, float]:
    """Return the estimate of a measured kind in bytes, with its margin as a fraction.

    `allocated`: torch's peak. `reserved`: the same with the allocator's cache. `nvidia-smi`, `vram`: the device's use.
    """
    if kind == "allocated":
        return document["peak_allocated_bytes"], document["margin_pct"] / 100
    context = CONTEXT if kind == "reserved" else 0
    return document["device_used_bytes"] - context, document["device_margin_pct"] / 100


def recipe_of(row: ExternalRow) -> RecipeName | None:
    """Return the recipe of the row's library; None: the row's command names one, or the library has none."""
    if "--recipe" in row.values["call"]:
        return None
    return next((recipe for word, recipe in RECIPE_OF if word in row.values["source"]), None)


def compare(row: ExternalRow, *, by_recipe: bool = True) -> Answered | Unanswered:
    """Return a row with its estimate, or the reason why there is none.

    `by_recipe`: with the recipe of its library, not as the row's command has it.
    """
    recipe = recipe_of(row) if by_recipe else None
    document = answer(row, **{"recipe": recipe} if recipe else {})
    if isinstance(document, Unanswered):
        return document
    kind, measured = row.values["measured_kind"], float(row.values["measured_bytes"])
    size, margin = estimated(document, kind)
    inside = abs(measured - size) <= margin * size
    return Answered(row=row, what=kind, measured=measured, estimated=size, inside=inside)


def overall(rows: list[Answered | Unanswered]) -> dict[str, float | int]:
    """Return the errors of all answered rows; empty if there are none."""
    answered = [row for row in rows if isinstance(row, Answered)]
    return summary(answered, INSIDE) if answered else {}


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
    given = rows_option(__doc__, "external_memory.csv")
    rows = [compare(row) for row in given]
    print_rows(rows, _sizes, "margin")
    without = overall([compare(row, by_recipe=False) for row in given])
    print(json.dumps({**document_of(rows), "without_recipes": without}))


if __name__ == "__main__":
    main()
