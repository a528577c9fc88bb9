"""Simulates houses from their seeds, or plants mutants into the product; the last line is one JSON object.

python -m tests.sim --seeds 0:10000
python -m tests.sim --replay 17
python -m tests.sim --mutants
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])

from tests.sim.measures import percentile
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.run import quiet, shrink, simulate
from tests.sim.world import Outcome

PROGRESS_S = 10.0


def houses(seeds: Iterable[int]) -> int:
    """Runs each; tells of those that break an invariant, with the fewest faults that still do."""
    begun = told = time.monotonic()
    held = True
    done: list[Outcome] = []
    for seed in seeds:
        outcome = simulate(seed)
        done.append(_without_trace(outcome))
        if outcome.violation is not None:
            held = False
            _tell(outcome)
        elif time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"seed {seed}: {json.dumps(summary(done, told - begun))}", flush=True)
    print(json.dumps(summary(done, time.monotonic() - begun)))
    return 0 if held else 1


def _without_trace(outcome: Outcome) -> Outcome:
    """Ten thousand stories would fill the memory."""
    return Outcome(**{**vars(outcome), "trace": ()})


def summary(done: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """`leak_age_*`, `detect_*`: virtual seconds, see tests/sim/README.md; `lifetimes_per_s`: real ones."""
    leaks = [age for outcome in done for age in outcome.leak_ages]
    raw = [age for outcome in done for age in outcome.leak_ages_raw]
    detects = [age for outcome in done for age in outcome.detects]
    lifetimes = sum(outcome.lifetimes for outcome in done)
    return {
        "lifetimes": lifetimes,
        "faults_mean": round(sum(outcome.faults for outcome in done) / max(1, len(done)), 2),
        "violations": sum(outcome.violation is not None for outcome in done),
        "leak_age_p50": round(percentile(leaks, 0.5), 1),
        "leak_age_p99": round(percentile(leaks, 0.99), 1),
        "leak_age_max": round(max(leaks, default=0.0), 1),
        "leak_age_raw_max": round(max(raw, default=0.0), 1),
        "detect_p95_s": round(percentile(detects, 0.95), 1),
        "lifetimes_per_s": round(lifetimes / max(seconds, 1e-9), 2),
    }


def replay(seed: int) -> int:
    """The whole story of one seed, or the shortest that breaks the same invariant."""
    begun, outcome = time.monotonic(), simulate(seed)
    if outcome.violation is None:
        states = ", ".join(outcome.states)
        print("\n".join(outcome.trace))
        print(f"seed {seed}: held; {states}; {outcome.steps} steps; {outcome.hash[:16]}")
    else:
        _tell(outcome)
    print(json.dumps(summary([outcome], time.monotonic() - begun)))
    return 0 if outcome.violation is None else 1


def _tell(outcome: Outcome) -> None:
    assert outcome.violation is not None
    name, message = outcome.violation
    print(f"seed {outcome.seed}: {name}: {message}", flush=True)
    best, plan = shrink(outcome.seed, name)
    print(f"  with {len(plan)} of {outcome.faults} faults: {', '.join(map(str, plan))}")
    print("\n".join(f"  {line}" for line in best.trace), flush=True)


def mutants(seeds: Sequence[int], only: str | None) -> int:
    """Each must be caught by an invariant that is named for it."""
    chosen = [mutant for mutant in MUTANTS if only is None or only in mutant.name]
    needed: list[int] = []
    for mutant in chosen:
        tried, others = hunt(mutant, seeds)
        said = f"caught by seed {seeds[tried - 1]}" if tried else "NOT CAUGHT"
        print(f"{mutant.name}: {said}{f'; besides {others}' if others else ''}", flush=True)
        needed += [tried] if tried else []
    print(json.dumps({"mutants": len(chosen), "caught": len(needed), "seeds_needed_max": max(needed, default=0)}))
    return 0 if len(needed) == len(chosen) else 1


def seeds_of(text: str) -> range:
    """`FROM:TO`, without TO itself."""
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=seeds_of, default=range(200), help="FROM:TO, without TO (default 0:200)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--replay", type=int, metavar="SEED", help="tell the whole story of one seed")
    what.add_argument("--mutants", action="store_true", help="plant each mutant until a seed catches it")
    parser.add_argument("--only", metavar="NAME", help="of the mutants those with this in their name")
    asked = parser.parse_args()
    quiet()
    if asked.mutants:
        return mutants(asked.seeds, asked.only)
    return houses(asked.seeds) if asked.replay is None else replay(asked.replay)


if __name__ == "__main__":
    sys.exit(main())
