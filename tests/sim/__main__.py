"""Simulates installations from their seeds, or plants mutants into the product; the last line is one JSON object.

- `python -m tests.sim --seeds 0:10000`
- `python -m tests.sim --seeds commit --lifetimes 1000 --hints dropped`
- `python -m tests.sim --hashes 100`
- `python -m tests.sim --replay 17`
- `python -m tests.sim --mutants`
- `python -m tests.sim --seeds 0:2000 --stories stories.json.gz`
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])

from tests.sim import many
from tests.sim.hunting import mutants
from tests.sim.outcome import Outcome, never_struck, summary, too_long
from tests.sim.run import quiet, simulate

PROGRESS_S = 10.0
MANY = 1_000
"""Number of lifetimes within which every kind of fault must have struck."""
SPACE = 10_000
"""Number of seeds of one commit; they begin at a multiple of it."""


def run_seeds(seeds: range, *, lifetimes: int | None, hints: bool, processes: int | None) -> int:
    """Run all seeds, or as many as have `lifetimes`; print the story of each that breaks an invariant."""
    begun = reported_at = time.monotonic()
    done: list[Outcome] = []
    lived = 0
    for result in many.results(seeds, hints=hints, processes=processes):
        done.append(result.outcome)
        lived += result.outcome.lifetimes
        if result.story:
            print(result.story, flush=True)
        for leak in too_long(result.outcome):
            print(leak, flush=True)
        if lifetimes is not None and lived >= lifetimes:
            break
        if time.monotonic() - reported_at > PROGRESS_S:
            reported_at = time.monotonic()
            so_far = summary(done, reported_at - begun) | {"faults": ""}
            print(f"seed {result.outcome.seed}: {json.dumps(so_far)}", flush=True)
    short = lifetimes is not None and lived < lifetimes
    if short:
        print(f"{len(seeds)} seeds have {lived} lifetimes, {lifetimes} were asked for; give more seeds")
    totals = summary(done, time.monotonic() - begun)
    idle = never_struck(totals) if lived >= MANY else []
    if idle:
        print(f"{', '.join(idle)}: drawn, and no job was struck; see faults.py")
    print(json.dumps(totals))
    return 1 if short or idle or any(outcome.violation or outcome.leaked for outcome in done) else 0


def replay(seed: int, *, hints: bool) -> int:
    """Print the story of one seed, or the shortest that breaks the same invariant."""
    begun, outcome = time.monotonic(), simulate(seed, hints=hints)
    if outcome.violation is None:
        states = ", ".join(outcome.states)
        print("\n".join(outcome.trace))
        print(f"seed {seed}: held; {states}; {outcome.steps} steps; {outcome.hash[:16]}")
    else:
        print(many.shortest_story(outcome, hints=hints))
    leaks = too_long(outcome)
    print("\n".join([*leaks, json.dumps(summary([outcome], time.monotonic() - begun))]))
    return 1 if outcome.violation or outcome.leaked else 0


def same(seeds: range) -> int:
    """Simulate each seed in two processes and count the equal stories."""
    others = many.differing(seeds)
    for seed in others:
        print(f"seed {seed} was another story in another process")
    print(json.dumps({"seeds": len(seeds), "same": len(seeds) - len(others)}))
    return 1 if others else 0


def stories(seeds: range, file: Path, *, hints: bool, processes: int | None) -> int:
    """Write the trace of every seed as one JSON line, so that two states of the code can be compared."""
    with many.pool(processes or os.cpu_count() or 1) as workers, gzip.open(file, "wt") as out:
        for outcome in workers.map(partial(simulate, hints=hints), seeds, chunksize=many.CHUNK):
            out.write(json.dumps([outcome.seed, outcome.steps, outcome.trace, outcome.violation]) + "\n")
    print(json.dumps({"seeds": len(seeds), "file": str(file)}))
    return 0


def seeds_of(text: str) -> range:
    """Return the seeds of `FROM:TO`, without TO, or of `commit`, which depend on the commit's hash."""
    if text == "commit":
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        start = int(head.stdout.strip() or "0", 16) % SPACE
        return range(start, start + SPACE)
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seeds", type=seeds_of, default=range(200), help="FROM:TO, without TO (default 0:200), or commit"
    )
    parser.add_argument("--lifetimes", type=int, metavar="N", help="no more seeds than N lifetimes take")
    parser.add_argument(
        "--hints", choices=("kept", "dropped"), default="kept", help="dropped: no NOTIFY, and no notice of a preemption"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="side by side (default: the cores of this machine)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--replay", type=int, metavar="SEED", help="tell the whole story of one seed")
    what.add_argument("--hashes", type=int, metavar="N", help="run the first N seeds in two processes, and compare")
    what.add_argument("--stories", type=Path, metavar="FILE", help="write the trace of every seed to a .json.gz file")
    what.add_argument("--mutants", action="store_true", help="plant each mutant until a seed catches it")
    parser.add_argument("--only", metavar="NAME", help="of the mutants those with this in their name")
    parser.add_argument("--known", action="store_true", help="try the seeds first that caught them before")
    parser.add_argument("--note", action="store_true", help="write down which seeds catch them")
    asked = parser.parse_args()
    hints = asked.hints == "kept"
    quiet()
    if asked.mutants:
        return mutants(asked.seeds, asked.only, known=asked.known, note=asked.note)
    if asked.hashes is not None:
        return same(range(asked.seeds.start, asked.seeds.start + asked.hashes))
    if asked.replay is not None:
        return replay(asked.replay, hints=hints)
    if asked.stories is not None:
        return stories(asked.seeds, asked.stories, hints=hints, processes=asked.processes)
    return run_seeds(asked.seeds, lifetimes=asked.lifetimes, hints=hints, processes=asked.processes)


if __name__ == "__main__":
    sys.exit(main())
