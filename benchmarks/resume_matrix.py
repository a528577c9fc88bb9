"""Comparison of killed and undisturbed runs: `python -m benchmarks.resume_matrix --schedules 100`.

Schedules of one to four kills each over nineteen tasks and methods (`tests.trainer.support.kill_schedules`). Kills are
SIGKILLs of the machine or of its worker, and drains. They also come inside an accumulation window, at the end of an
epoch, in an evaluation, in a save or in a restore. Exact: every loss, weight, moment and result is bitwise that of the
undisturbed run. All loaded data had been saved so, and nothing older than the last commit was loaded. For comparison as
many schedules of HF Trainer and of accelerate run (`benchmarks.resume_rivals`). The last line is JSON.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from benchmarks import resume_rivals
from tests.trainer.support.kill_schedules import Matrix

LogLine = Callable[[str], None]
RIVALS: tuple[resume_rivals.Rival, ...] = get_args(resume_rivals.Rival)
OURS = "ours"
SHOW_EVERY = 5


def ours(folder: Path, numbers: Iterable[int], seed: int, log_line: LogLine) -> dict[str, Any]:
    """This trainer's part of the last line."""
    matrix = Matrix(folder)
    found = matrix.found
    for number in numbers:
        before = len(found.broken)
        matrix.carry_out(number, seed)
        for line in found.broken[before:]:
            log_line(line)
        if found.schedules % SHOW_EVERY == 0:
            log_line(f"ours: {found.exact} of {found.schedules} exact, {found.kills.total()} kills")
    return {
        "schedules": found.schedules,
        "exact": found.exact,
        "torn_loaded": found.torn_loaded,
        "lost": found.lost,
        "kills": found.kills.total(),
        "kills_by": dict(sorted(found.kills.items())),
        "lives": found.lives,
    }


def rival(
    which: resume_rivals.Rival, folder: Path, numbers: Iterable[int], seed: int, log_line: LogLine
) -> dict[str, Any]:
    """Return a rival's part of the last line."""
    schedules = resume_rivals.Schedules(rival=which, folder=folder)
    schedules.measure()
    found = schedules.found
    for number in numbers:
        schedules.carry_out(number, seed)
        if found.schedules % SHOW_EVERY == 0:
            log_line(
                f"{which}: {found.exact} of {found.schedules} exact, {found.unloadable} of {found.kills} unloadable"
            )
    return {
        f"baseline_{which}_exact": found.exact,
        f"baseline_{which}_schedules": found.schedules,
        f"baseline_{which}_kills": found.kills,
        f"baseline_{which}_unloadable": found.unloadable,
    }


def within(count: int, minutes: float) -> Iterator[int]:
    """Return numbers up to `count`, or until `minutes` have passed."""
    until = time.monotonic() + minutes * 60
    return itertools.takewhile(lambda _: time.monotonic() < until, range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--rival-schedules", type=int, help="Of each rival; as many by default.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Of each part, after which none is begun.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=(OURS, *RIVALS), help="Again for several; all by default.")
    asked = parser.parse_args()
    which = asked.only or (OURS, *RIVALS)
    theirs = asked.schedules if asked.rival_schedules is None else asked.rival_schedules
    told: dict[str, Any] = {}

    def log_line(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="gb-") as folder:
        if OURS in which:
            told |= ours(Path(folder) / OURS, within(asked.schedules, asked.minutes), asked.seed, log_line)
        for name in RIVALS:
            if name in which:
                (Path(folder) / name).mkdir()
                told |= rival(name, Path(folder) / name, within(theirs, asked.minutes), asked.seed, log_line)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
