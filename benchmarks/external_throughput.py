"""Compare estimated speed with other laboratories' published rows: `python -m benchmarks.external_throughput`.

Every row is printed. The last line is JSON: errors in percent, `coverage_90` as a share of the answered rows, and
`median_width`. The width is the factor of the interval (1.5: from the speed / 1.5 to the speed x 1.5). `unseen_groups`
has coverage and width of each group by intervals that its rows did not calibrate.
"""

import json
import math
import statistics
from collections.abc import Sequence
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
from benchmarks.throughput_groups import GroupedError, group_of, group_widths, unseen_groups
from broker.estimator.speed.calibration import SPREAD_OTHER_CODE, SPREAD_OTHER_CODE_FAR
from broker.estimator.speed.throughput import NEAREST

INSIDE = "coverage_90"


def compare(row: ExternalRow) -> Answered | Unanswered:
    """Return a row with its estimate, or the reason why there is none."""
    document = answer(row)
    if isinstance(document, Unanswered):
        return document
    if document["tokens_per_s"] is None:
        return Unanswered(row=row, reason=document["tokens_per_s_basis"])
    low, high = document["tokens_per_s_interval"]
    measured = float(row.values["measured_tps"])
    return Answered(
        row=row, what=document["tokens_per_s_evidence"], measured=measured, estimated=document["tokens_per_s"],
        inside=low <= measured <= high, width=math.sqrt(high / low), near=NEAREST in document["tokens_per_s_basis"],
    )  # fmt: skip


def grouped_errors(rows: Sequence[Answered]) -> list[GroupedError]:
    """Return the rows as groups see them. An interval wider than the shipped widths has another cause, and stays."""
    shipped = {True: SPREAD_OTHER_CODE, False: SPREAD_OTHER_CODE_FAR}
    return [
        GroupedError(
            group=group_of(row.row.values["source"]),
            near=row.near,
            error=abs(math.log(row.estimated / row.measured)),
            least=row.width if row.width > shipped[row.near] + 0.001 else 1.0,
        )
        for row in rows
    ]


def with_width(rows: Sequence[Answered]) -> dict[str, float | int]:
    """Return the errors of some rows, with the median factor of their intervals."""
    return {**summary(rows, INSIDE), "median_width": round(statistics.median(row.width for row in rows), 3)}


def document_of(rows: list[Answered | Unanswered]) -> dict[str, Any]:
    """Return the document of the last line."""
    answered = [row for row in rows if isinstance(row, Answered)]
    if not answered:
        nulls = dict.fromkeys(("median_abs_pct", "p90_abs_pct", INSIDE, "median_width"))
        return {"n": 0, **nulls, "by_source": {}, **refusals(rows)}
    return {
        **with_width(answered),
        "by_source": {name: with_width(group) for name, group in by_column(answered, "source").items()},
        "unseen_groups": unseen_groups(grouped_errors(answered)),
        "by_gpu": {name: with_width(group) for name, group in by_column(answered, "gpu").items()},
        **refusals(rows),
    }


def _rates(row: Answered) -> str:
    return f"{row.measured:10.1f} tokens/s, estimated {row.estimated:10.1f} / and x {row.width:.2f}"


def main() -> None:
    """Print every row, then one JSON line."""
    rows = [compare(row) for row in rows_option(__doc__, "external_throughput.csv")]
    print_rows(rows, _rates, "interval")
    widths = group_widths(grouped_errors([row for row in rows if isinstance(row, Answered)]))
    if widths is not None:
        print(f"widths by the groups of these rows: near {widths.near:.3f}, far {widths.far:.3f}")
    print(json.dumps(document_of(rows)))


if __name__ == "__main__":
    main()
