"""Published rows in the form of `external_*.csv`, answered by `gpubroker estimate`; used by `external_memory` and
`external_throughput`.

`call` of a row is the command line. Its config is a file of `configs/` in the folder of the rows, or a catalogue model.
"""

import argparse
import csv
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import typer

from broker.cli.commands.estimate import estimate as command
from broker.sizing.estimate import EstimateError, estimate

EXTERNAL = Path(__file__).parent / "data" / "external"


@dataclass(frozen=True, kw_only=True)
class ExternalRow:
    """One published row. `values` has all of its columns."""

    folder: Path
    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """Return the row's id with what its source leaves open."""
        ambiguous = self.values["ambiguous"]
        return self.values["id"] + (f" [{ambiguous}]" if ambiguous else "")


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A row without an estimate, with the reason."""

    row: ExternalRow
    reason: str


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A row with its estimate. `inside`: the measured value lies within the margin or the interval.

    `width`: factor of the interval, `/ and x width`; 0 for a memory. `near`: runs of its family on its GPU were fitted.
    """

    row: ExternalRow
    what: str
    measured: float
    estimated: float
    inside: bool
    width: float = 0.0
    near: bool = False

    @property
    def error(self) -> float:
        """Return the estimate's error in percent of the measured value; negative: too little."""
        return 100 * (self.estimated / self.measured - 1)


def read(path: Path) -> Iterator[ExternalRow]:
    """Yield the rows of a file. Lines that begin with # are comments."""
    with path.open(newline="") as file:
        for values in csv.DictReader(line for line in file if not line.startswith("#")):
            yield ExternalRow(folder=path.parent, values=values)


APP = typer.Typer(add_completion=False)
APP.command("estimate")(command)
COMMAND = typer.main.get_command(APP)


def arguments(row: ExternalRow) -> dict[str, Any]:
    """Return the arguments of `broker.estimate()` for a row's command line. Raise EstimateError or TyperException."""
    words = shlex.split(row.values["call"])
    if words[:2] != ["gpubroker", "estimate"]:
        raise EstimateError(f"{row.values['call'][:60]!r}: is not a call of gpubroker estimate")
    with COMMAND.make_context("estimate", words[2:]) as context:
        given = {name: context.params[name] for name in signature(estimate).parameters}
    given["stack"] = ",".join(given["stack"]) if given["stack"] else None
    if given["config"]:
        beside = row.folder / "configs" / given["config"]
        given["config"] = str(beside if beside.exists() else row.folder / given["config"])
    return given


def answer(row: ExternalRow, **options: Any) -> Mapping[str, Any] | Unanswered:
    """Return the document of the estimate, or the reason why there is none. `options` replace those of the row."""
    try:
        return estimate(**{**arguments(row), **options})
    except EstimateError as e:
        return Unanswered(row=row, reason=str(e))
    except typer.TyperException as e:
        return Unanswered(row=row, reason=e.format_message())


def p90(errors: Iterable[float]) -> float:
    """Return the smallest error that at least 90 % of the errors do not exceed."""
    ordered = sorted(errors)
    return ordered[math.ceil(0.9 * len(ordered)) - 1]


def summary(rows: Sequence[Answered], inside: str) -> dict[str, float | int]:
    """Return the errors of some rows in percent, and the share of the rows `inside` as a fraction."""
    errors = [abs(row.error) for row in rows]
    return {
        "n": len(rows),
        "median_abs_pct": round(statistics.median(errors), 2),
        "p90_abs_pct": round(p90(errors), 2),
        inside: round(statistics.fmean(row.inside for row in rows), 3),
    }


def by_column(rows: Iterable[Answered], column: str) -> dict[str, list[Answered]]:
    """Group rows by the value of a column, in the order of their names."""
    groups: dict[str, list[Answered]] = {}
    for row in rows:
        groups.setdefault(row.row.values[column], []).append(row)
    return dict(sorted(groups.items()))


def refusals(rows: Sequence[Answered | Unanswered]) -> dict[str, Any]:
    """Return the number of rows without an estimate, in total and by source."""
    sources = Counter(row.row.values["source"] for row in rows if isinstance(row, Unanswered))
    return {"refused": sum(sources.values()), "refused_by_source": dict(sorted(sources.items()))}


def print_rows(rows: Iterable[Answered | Unanswered], shown: Callable[[Answered], str], inside: str) -> None:
    """Print each row. `shown` returns measured and estimated values; `inside`: name of the range of the estimate."""
    for row in rows:
        if isinstance(row, Unanswered):
            print(f"refused    {row.row.name}: {row.reason}")
        else:
            mark = "" if row.inside else f" outside the {inside}"
            print(f"{row.error:+8.2f} %  {shown(row)}  {row.what}: {row.row.name}{mark}")


def rows_option(documentation: str | None, default: str) -> list[ExternalRow]:
    """Return the rows of the file that the command line names, by default of this repository's file."""
    parser = argparse.ArgumentParser(description=documentation)
    parser.add_argument("--rows", type=Path, default=EXTERNAL / default, help="a file in the form of external_*.csv")
    rows = list(read(parser.parse_args().rows))
    if not rows:
        parser.error("--rows: the file has no rows")
    return rows
