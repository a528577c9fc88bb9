"""The long versions of the reliability tests, for as long as they are let, and what they have come to in all.

    .venv/bin/python -m tests.soak --minutes 120        # goes on where the last one ended
    .venv/bin/python -m tests.soak --only crash --totals FILE

Each part is a command whose last line is one JSON object of numbers and whose exit status is 1 where something broke.
The numbers are added up in a file after every round, so nothing is lost when this is ended at any time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOUSES = 250
"""Simulated ones in a round."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One round of it: `python -m` with the arguments for the round of that number, each of which draws anew."""

    command: Callable[[int], Sequence[str]]


PARTS: Mapping[str, Part] = {
    "crash-points": Part(command=lambda n: ("tests.crash", "--points", "all", "--seed", str(n))),
    "crash-random": Part(command=lambda n: ("tests.crash", "--random", "100", "--cuts", "50", "--seed", str(n))),
    "sim": Part(command=lambda n: ("tests.sim", "--seeds", f"{n * HOUSES}:{(n + 1) * HOUSES}")),
    "crash-fights": Part(command=lambda n: ("tests.crash", "--fights", "50", "--postgres", "20", "--seed", str(n))),
}


def default_totals() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gpubroker-soak" / "totals.json"


def added(before: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of all whole numbers; a part may tell new ones. Of the others, seconds and rates, the greatest."""
    counts = {name: value for name, value in told.items() if isinstance(value, int)}
    measured = {name: value for name, value in told.items() if isinstance(value, float)}
    sums = {name: before.get(name, 0) + value for name, value in counts.items()}
    return dict(before) | sums | {name: max(before.get(name, value), value) for name, value in measured.items()}


def round_of(name: str, number: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """(what it told, whether it held). The words of one that did not are kept beside the totals."""
    done = subprocess.run(
        [sys.executable, "-m", *PARTS[name].command(number)], capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    try:
        told = json.loads(lines[-1]) if lines else {}
    except ValueError:
        told = {}
    if done.returncode:
        (folder / f"{name}-{number}.log").write_text(done.stderr + done.stdout)
    return told if isinstance(told, dict) else {}, done.returncode == 0


def kept(file: Path, totals: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(totals, indent=2) + "\n")
    draft.replace(file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins later; default 60")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--totals", type=Path, default=default_totals(), help="file of the sums; default %(default)s")
    told = parser.parse_args(arguments)
    told.totals.parent.mkdir(parents=True, exist_ok=True)
    totals = json.loads(told.totals.read_text()) if told.totals.exists() else {}
    ends, turn, failed = time.monotonic() + 60 * told.minutes, 0, False
    while time.monotonic() < ends:
        name = told.only[turn % len(told.only)]
        turn += 1
        before = totals.get(name, {})
        result, held = round_of(name, before.get("rounds", 0), told.totals.parent)
        totals[name] = added(before, result | {"rounds": 1, "failed_rounds": int(not held)})
        kept(told.totals, totals)
        failed |= not held
        print(f"{name}: {'held' if held else 'BROKE'}; in all {json.dumps(totals[name])}", flush=True)
    print(json.dumps(totals))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
