"""Speed-up by more GPUs, against published results for 8 to 512 of them.

Covers every row of llm-foundry and torchtitan that is not fp8. Prints the throughput by number of GPUs, by a fit
without the row's model, and its change from the fewest measured GPUs. Prints also the plan that the planner would
choose, with its estimated throughput and the best measured one. The last line is JSON.
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
    found = re.search(r", (\d+) x ", row.name)
    assert found is not None
    return int(found[1])


def alike(row: Row) -> str:
    """Return the row's name without the number of GPUs: rows with the same name show the effect of more GPUs."""
    return re.sub(r", \d+ x ", ", ", row.name)


def efficiencies(left: Iterable[Left]) -> dict[int, list[float]]:
    """Return ln of estimated over measured change of tokens/s and GPU since the fewest GPUs, by number of GPUs."""
    groups: dict[str, list[Left]] = {}
    for one in left:
        groups.setdefault(f"{one.row.source} {alike(one.row)}", []).append(one)
    found: dict[int, list[float]] = {}
    for same in groups.values():
        fewest = min(same, key=lambda one: devices(one.row))
        for one in same:
            if devices(one.row) > devices(fewest.row):
                found.setdefault(devices(one.row), []).append(one.surprise - fewest.surprise)
    return found


def by_count(left: Iterable[Left]) -> dict[str, list[float]]:
    """Surprises by number of GPUs."""
    found: dict[int, list[float]] = {}
    for one in left:
        found.setdefault(devices(one.row), []).append(one.surprise)
    return {f"{n} GPUs": found[n] for n in sorted(found)}


def _median(surprises: Sequence[float]) -> float:
    return round(statistics.median(100 * abs(math.expm1(s)) for s in surprises), 2)


def main() -> None:
    """Prints the tables, then one JSON line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows, _ = everything()
    used = [r for r in rows if r.source in SCALED or r.source == "fms"]
    left = [one for one in left_out(used, lambda r: r.group) if one.row.source in SCALED]
    for source in SCALED:
        table(
            f"{source}: its model left out of the fit, by number of GPUs",
            by_count(o for o in left if o.row.source == source),
        )
    shipped = [Left(row=o.row, surprise=surprise(o.row, FITTED)) for o in left]
    table("both, as shipped (fitted on these rows)", by_count(shipped))
    changes = efficiencies(left)
    table("change of tokens/s and GPU since the fewest GPUs", {f"{n} GPUs": changes[n] for n in sorted(changes)})
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
