"""The long versions of the reliability tests, for a given time, with totals over all runs.

    .venv/bin/python -m tests.soak --minutes 120        # continues where the last one ended .venv/bin/python -m
    tests.soak --only checkpoints fuzz --totals FILE

The part with the least time so far is next. One that has reached its goal leaves its time to the others, until all are
there.

Each part is a command whose last line is one JSON object of numbers and whose exit status is 1 where something broke.
The numbers are added up in a file after every round, so nothing is lost when this is ended at any time.
"""

import argparse
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALLATIONS = 1_000
"""Simulated installations in a round. A round takes minutes, because at its end a core waits for the other."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the soak: `command` returns the arguments of `python -m` by the round's number, which is its seed."""

    command: Callable[[int], Sequence[str]]
    goal: tuple[str, int] | None = None
    """A sum and how far it is to come; None: there is never enough."""

    def reached(self, sums: Mapping[str, Any]) -> bool:
        return self.goal is not None and int(sums.get(self.goal[0], 0)) >= self.goal[1]


def _sim(number: int, installations: int, *more: str) -> Sequence[str]:
    return ("tests.sim", "--seeds", f"{number * installations}:{(number + 1) * installations}", *more)


def _crash(number: int, *what: str) -> Sequence[str]:
    return ("tests.crash", *what, "--seed", str(number))


ENDS = ("--homes", "14", "--migrations", "4", "--terms", "8", "--freezes", "8", "--disks", "4", "--births", "3")
PARTS: Mapping[str, Part] = {
    "sim": Part(command=lambda n: _sim(n, INSTALLATIONS), goal=("lifetimes", 1_000_000)),
    "sim-without-hints": Part(
        command=lambda n: _sim(n, INSTALLATIONS, "--hints", "dropped"), goal=("lifetimes", 10_000)
    ),
    "crash-points": Part(command=lambda n: _crash(n, "--points", "all"), goal=("kills", 500)),
    "crash-random": Part(command=lambda n: _crash(n, "--random", "50", "--cuts", "10"), goal=("kills", 500)),
    "crash-ends": Part(command=lambda n: _crash(n, *ENDS), goal=("kills", 100)),
    "crash-fights": Part(command=lambda n: _crash(n, "--fights", "20"), goal=("kills", 200)),
    "crash-postgres": Part(command=lambda n: _crash(n, "--postgres", "10"), goal=("kills", 100)),
    "checkpoints": Part(command=lambda n: _crash(n, "--checkpoints", "100"), goal=("kills", 1_000)),
    "fuzz": Part(command=lambda n: ("tests.api.fuzz", "--cases", "5000", "--seed", str(n)), goal=("cases", 100_000)),
}


def default_totals() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gpubroker-soak" / "totals.json"


def added(before: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of all whole numbers, of which a round may add new ones, and the maxima of seconds and rates."""
    counts = {name: value for name, value in told.items() if isinstance(value, int)}
    measured = {name: value for name, value in told.items() if isinstance(value, float)}
    sums = {name: before.get(name, 0) + value for name, value in counts.items()}
    return dict(before) | sums | {name: max(before.get(name, value), value) for name, value in measured.items()}


def round_of(name: str, number: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Run a round; return its result and whether it passed. Output of a failed or long-leaking round is stored next to
    the sums.
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *PARTS[name].command(number)], capture_output=True, text=True, check=False,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    try:
        told = json.loads(lines[-1]) if lines else {}
    except ValueError:
        told = {}
    result = told if isinstance(told, dict) else {}
    if done.returncode or result.get("leaks_long"):
        (folder / f"{name}-{number}.log").write_text(done.stderr + done.stdout)
    return result | {"seconds": round(time.monotonic() - begun)}, done.returncode == 0


def end_with_parent() -> None:
    """Interrupt the round when its parent is killed, so that the round cleans up after itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def behind(totals: Mapping[str, Any], parts: Sequence[str]) -> str:
    """Return the part with the least time so far, so that short runs reach all parts. Parts below their goals come
    first."""
    short = [name for name in parts if not PARTS[name].reached(totals.get(name, {}))]
    return min(short or parts, key=lambda name: [totals.get(name, {}).get(what, 0) for what in ("seconds", "rounds")])


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the sums. Raises SystemExit if another process holds the lock."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{folder}: another soak is adding up there; wait for it, or give --totals") from None
        yield


def kept(file: Path, totals: Mapping[str, Any]) -> None:
    """Write the sums atomically."""
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
    with alone(told.totals.parent):
        return soak(told.totals, told.only, time.monotonic() + 60 * told.minutes)


def soak(file: Path, parts: Sequence[str], until: float) -> int:
    """Run rounds until the time is over, one at least, and add each up as it ends. Return the exit status."""
    totals = json.loads(file.read_text()) if file.exists() else {}
    failed = False
    while True:
        name = behind(totals, parts)
        before = totals.get(name, {})
        result, held = round_of(name, before.get("rounds", 0), file.parent)
        totals[name] = added(before, result | {"rounds": 1, "failed_rounds": int(not held)})
        kept(file, totals)
        failed |= not held
        print(f"{name}: {'held' if held else 'BROKE'}; in all {json.dumps(totals[name])}", flush=True)
        if time.monotonic() >= until:
            break
    print(json.dumps(totals))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
