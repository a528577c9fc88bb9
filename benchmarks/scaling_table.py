"""Compare estimated speed-up by more GPUs with published results for 8 to 512 GPUs.

Covers every row of llm-foundry and torchtitan that is not fp8. Prints two errors by number of GPUs: of the throughput
by a fit without the row's model, and of its change from the fewest GPUs. The last line is JSON.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.throughput_fit import surprise
from benchmarks.throughput_rows import Row, everything
from benchmarks.throughput_table import Left, left_out, table
from broker.estimator.speed.calibration import FITTED

SCALED = ("llm-foundry", "torchtitan")


def devices(row: Row) -> int:
    """Return the number of GPUs of a row."""
    match = re.search(r", (\d+) x ", row.name)
    assert match is not None
    return int(match[1])


def series(row: Row) -> str:
    """Return the row's name without the number of GPUs: rows with the same name show the effect of more GPUs."""
    return re.sub(r", \d+ x ", ", ", row.name)


def efficiencies(left: Iterable[Left]) -> dict[int, list[float]]:
    """Return errors of the change of tokens/s per GPU from the fewest GPUs, by number of GPUs.

    An error is the logarithm of the estimated over the measured change.
    """
    groups: dict[str, list[Left]] = {}
    for result in left:
        groups.setdefault(f"{result.row.source} {series(result.row)}", []).append(result)
    errors: dict[int, list[float]] = {}
    for same in groups.values():
        fewest = min(same, key=lambda result: devices(result.row))
        for result in same:
            if devices(result.row) > devices(fewest.row):
                errors.setdefault(devices(result.row), []).append(result.surprise - fewest.surprise)
    return errors


def by_count(left: Iterable[Left]) -> dict[str, list[float]]:
    """Return surprises by number of GPUs."""
    surprises: dict[int, list[float]] = {}
    for result in left:
        surprises.setdefault(devices(result.row), []).append(result.surprise)
    return {f"{n} GPUs": surprises[n] for n in sorted(surprises)}


def _median(surprises: Sequence[float]) -> float:
    return round(statistics.median(100 * abs(math.expm1(s)) for s in surprises), 2)


def main() -> None:
    """Print the tables, then one JSON line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows, _ = everything()
    used = [r for r in rows if r.source in SCALED or r.source == "fms"]
    left = [result for result in left_out(used, lambda r: r.group) if result.row.source in SCALED]
    for source in SCALED:
        table(
            f"{source}: its model left out of the fit, by number of GPUs",
            by_count(o for o in left if o.row.source == source),
        )
    shipped = [Left(row=o.row, surprise=surprise(o.row, FITTED)) for o in left]
    table("both, as shipped (fitted on these rows)", by_count(shipped))
    changes = efficiencies(left)
    table("change of tokens/s per GPU from the fewest GPUs", {f"{n} GPUs": changes[n] for n in sorted(changes)})
    every = [s for group in changes.values() for s in group]
    print(
        json.dumps(
            {
                "n": len(left),
                "gpus": [min(devices(o.row) for o in left), max(devices(o.row) for o in left)],
                "median_pct": _median([o.surprise for o in left]),
                "n_changes": len(every),
                "change_median_pct": _median(every),
                "change_max_pct": round(max(100 * abs(math.expm1(s)) for s in every), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
