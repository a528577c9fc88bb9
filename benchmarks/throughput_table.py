"""Compare the broker's model of training speed with published results.

Prints tables by source and GPU, and one JSON line. Other tables show errors of rows whose model size, method or GPU the
fit left out. `--fit` prints newly fitted shares for `broker.estimator.speed.calibration`; `--rows` prints every row.
"""

import argparse
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.throughput_fit import fit, fitted, quantile, surprise
from benchmarks.throughput_groups import GroupedError, held_without_group, widest_quantile
from benchmarks.throughput_rows import Row, blind, everything
from broker.estimator.speed.calibration import (
    FITTED,
    GPU_PRIOR,
    SPREAD_MEASURED,
    SPREAD_MIXTURE,
    SPREAD_UNMEASURED,
    Belief,
    believe,
)
from broker.estimator.speed.hardware import TABLE

DRAWS = 20
HELD_OUT = "peft"
"""Source whose rows no fit ever used."""
ARCHITECTURES: Mapping[str, frozenset[str]] = {
    "Hopper": frozenset({"h100-sxm", "h100-500w"}),
    "Ampere": frozenset({"a100-80gb-sxm", "a100-40gb"}),
    "Ada": frozenset({"l40s"}),
}


@dataclass(frozen=True, kw_only=True)
class Left:
    """A row, and its error by a fit without similar rows. `surprise`: log of estimated over measured speed."""

    row: Row
    surprise: float


def left_out(rows: Sequence[Row], key: Callable[[Row], str], *, per_gpu: bool = True) -> list[Left]:
    """Return each row with its error by a fit on the rows that have another key."""
    found = []
    for value in sorted({key(r) for r in rows}):
        by = fit([r for r in rows if key(r) != value], per_gpu=per_gpu)
        found += [Left(row=r, surprise=surprise(r, by)) for r in rows if key(r) == value]
    return found


def unseen(rows: Sequence[Row], held: Sequence[Row]) -> list[Left]:
    """Return each of `rows` by a fit on GPUs of other architectures, and each of `held` by a fit on all `rows`."""
    of = {gpu: name for name, gpus in ARCHITECTURES.items() for gpu in gpus}
    shared = fit(rows, per_gpu=False)
    return left_out(rows, lambda r: of[r.gpu], per_gpu=False) + [
        Left(row=r, surprise=surprise(r, shared)) for r in held
    ]


def path_of(row: Row) -> tuple[str, str, str]:
    """Return the row's path, in the form of the broker's own runs. Another library counts as another GPU."""
    return f"{row.source} on {row.gpu}", row.method, row.family


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Remaining error after a correction by other runs, and half the width of its interval, as logarithms."""

    surprise: float
    width: float


def after_runs(left: Sequence[Left], runs: int) -> list[Corrected]:
    """Return each row as the broker corrects it after `runs` other runs of the same GPU and library.

    With one run, each other row is used in turn; with several, `DRAWS` random choices are.
    """
    found, draw = [], random.Random(runs)
    learned: dict[tuple[object, ...], Belief] = {}
    for one in left:
        path = path_of(one.row)
        others = [o for o in left if o is not one and path_of(o.row)[0] == path[0]]
        if len(others) < runs:
            continue
        for chosen in [[o] for o in others] if runs == 1 else [draw.sample(others, runs) for _ in range(DRAWS)]:
            known = tuple(sorted((path_of(o.row), -o.surprise) for o in chosen))
            belief = learned.get((path, known))
            if belief is None:
                belief = learned[path, known] = believe(known, path, GPU_PRIOR)
            width = math.log(SPREAD_UNMEASURED) * belief.scale
            found.append(Corrected(surprise=one.surprise + belief.shift, width=width))
    return found


def covered(left: Sequence[Left], key: Callable[[Row], str], coverage: float = 0.9) -> float:
    """Return the share of rows that lie in the interval made from the errors of rows with other keys."""
    hits = 0
    for value in {key(one.row) for one in left}:
        width = quantile((one.surprise for one in left if key(one.row) != value), coverage)
        hits += sum(abs(one.surprise) <= width for one in left if key(one.row) == value)
    return hits / len(left)


def words(surprises: Sequence[float]) -> str:
    """Return number, median, P90, maximum and bias of errors, in percent of the measured speed."""
    errors = sorted(100 * abs(math.expm1(s)) for s in surprises)
    p90 = errors[min(len(errors), math.ceil(0.9 * len(errors))) - 1]
    bias = 100 * math.expm1(statistics.median(surprises))
    return f"{len(errors):5}  {statistics.median(errors):6.2f} {p90:6.2f} {errors[-1]:6.1f}  {bias:+6.2f}"


def table(title: str, groups: Mapping[str, Sequence[float]]) -> None:
    """Print one line for each group."""
    print(f"\n{title}\n{'':44} rows  median    p90    max    bias   (% of the measured tokens/s)")
    for name, surprises in groups.items():
        print(f"{name:44}{words(surprises)}")


def grouped(left: Iterable[Left]) -> dict[str, list[float]]:
    """Group surprises by source and GPU."""
    groups: dict[str, list[float]] = {}
    for one in left:
        groups.setdefault(f"{one.row.source} on {one.row.gpu}", []).append(one.surprise)
    return groups


def by_group(left: Iterable[Left]) -> dict[str, list[float]]:
    """Group surprises by the rows that were left out together."""
    groups: dict[str, list[float]] = {}
    for one in left:
        groups.setdefault(one.row.group, []).append(one.surprise)
    return groups


def by_family(left: Iterable[Left]) -> dict[str, list[float]]:
    """Group surprises by architecture and method."""
    groups: dict[str, list[float]] = {}
    for one in left:
        groups.setdefault(f"{one.row.family}, {one.row.group}", []).append(one.surprise)
    return groups


def _percent(surprises: Iterable[float], pick: Callable[[list[float]], float] = statistics.median) -> float:
    return round(pick([100 * abs(math.expm1(s)) for s in surprises]), 2)


def _p90(errors: list[float]) -> float:
    return sorted(errors)[math.ceil(0.9 * len(errors)) - 1]


def eager_groups(known: Sequence[Left]) -> list[GroupedError]:
    """Return the errors of eager code by method and library: rows of the fit by fits without their group, later rows.

    A mixture of experts has an interval of its own.
    """
    eager = [one for one in known if one.row.at_best[0].modules]
    later = [Left(row=r, surprise=surprise(r, FITTED)) for r in blind() if "mixtral" not in r.family]
    return [GroupedError(group=one.row.group, near=True, error=abs(one.surprise)) for one in (*eager, *later)]


def intervals(eager: Sequence[GroupedError], strange: Sequence[Left]) -> dict[str, float]:
    """Return factors: 90 % intervals of eager rows and of unseen architectures, and the worst unseen row."""
    return {
        "SPREAD_MEASURED": round(math.exp(widest_quantile(eager)), 3),
        "SPREAD_UNMEASURED": round(math.exp(quantile((one.surprise for one in strange), 1.0)), 3),
        "unseen_90": round(math.exp(quantile((one.surprise for one in strange), 0.9)), 3),
    }


def _as_shipped(rows: Sequence[Row], *, each: bool) -> None:
    shipped = [Left(row=r, surprise=surprise(r, FITTED)) for r in rows]
    if each:
        for one in shipped:
            off = f"{100 * math.expm1(one.surprise):+7.2f} %  {one.row.rate:9.1f} tokens/s"
            print(f"{off}  {one.row.source}: {one.row.name}")
    table("as shipped (fitted on these rows, except peft)", grouped(shipped))


def _of_later() -> dict[float, list[bool]]:
    """Return, for each interval width, whether each row that no fit used lies in the interval."""
    unknown = [Left(row=r, surprise=surprise(r, FITTED)) for r in blind()]
    table(
        "as shipped, for fms-acceleration with transformers 4.45.2 and mixtures of experts (not fitted on)",
        by_family(unknown),
    )
    later = {
        width: [abs(one.surprise) <= math.log(width) for one in unknown if ("mixtral" in one.row.family) == mixture]
        for mixture, width in ((False, SPREAD_MEASURED), (True, SPREAD_MIXTURE))
    }
    for width, within in later.items():
        print(f"/ and x {width:g} holds {sum(within)} of {len(within)} of these rows")
    return later


def _after(rows: Sequence[Row], strange: Sequence[Left]) -> dict[int, list[Corrected]]:
    """Return the corrected surprises by the number of known runs of an unseen GPU."""
    measured = {r.gpu for r in rows}
    print(", ".join(name for name, h in TABLE.items() if h.gpu and name not in measured) + ": no measurement yet")
    after = {runs: after_runs(strange, runs) for runs in (1, 3, 10)}
    table(
        "architecture left out, other runs of that GPU and library known",
        {f"{runs} known": [one.surprise for one in known_so] for runs, known_so in after.items()},
    )
    for runs, known_so in after.items():
        inside = sum(abs(one.surprise) <= one.width for one in known_so) / len(known_so)
        factor = math.exp(statistics.median(one.width for one in known_so))
        print(f"{runs:3} known: interval / and x {factor:.3f} (median) holds {100 * inside:.1f} %")
    return after


def main() -> None:
    """Print the tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print newly fitted shares")
    parser.add_argument("--rows", action="store_true", help="print every row")
    args = parser.parse_args()
    rows, refused = everything()
    used, held = [r for r in rows if r.source != HELD_OUT], [r for r in rows if r.source == HELD_OUT]
    if args.fit:
        print(fitted(used))
    _as_shipped(rows, each=args.rows)
    later = _of_later()
    known = left_out(used, lambda r: r.group)
    sizes = [one for one in known if one.row.source == "llm-foundry"]
    table("model size left out (llm-foundry)", by_group(sizes))
    table("method or model left out (others)", by_group(one for one in known if one.row.source != "llm-foundry"))
    strange = unseen(used, held)
    table("architecture left out, no run on it", grouped(strange))
    after = _after(rows, strange)
    print("\nnot estimated:", "; ".join(f"{n} {why}" for why, n in Counter(r.reason for r in refused).items()))
    eager = eager_groups(known)
    print("intervals:", intervals(eager, strange))
    unseen_share = held_without_group(eager)
    print(f"coverage of eager rows, each group by the others: {unseen_share:.2f} of {len(eager)}")
    summary = {
        "n": len(rows),
        "lomo_median_pct": _percent(one.surprise for one in sizes),
        "lomo_p90_pct": _percent((one.surprise for one in sizes), _p90),
        "unseen_gpu_no_run_median_pct": _percent(one.surprise for one in strange),
        "unseen_gpu_one_run_median_pct": _percent(one.surprise for one in after[1]),
        "coverage_90": round(covered(sizes, lambda r: r.group), 3),
        "coverage_of_later_rows": round(statistics.fmean(later[SPREAD_MEASURED]), 3),
        "coverage_of_unseen_groups": round(unseen_share, 3),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
