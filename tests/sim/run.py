"""`python -m tests.sim.run --seeds 0-199 [--one SEED] [--trace]`: simulates houses; ends with one line of JSON."""

import argparse
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0" and __name__ == "__main__":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.sim.run", *sys.argv[1:]])

from tests.sim.faults import Fault, plan_of
from tests.sim.world import Outcome, World

PROGRESS_S = 10.0
MOST_TRIES = 60
"""Runs that a failing seed is shrunk by."""


def simulate(seed: int, plan: Sequence[Fault] | None = None) -> Outcome:
    """One house from its first job until everything is over, or an invariant breaks."""
    chosen = plan_of(seed) if plan is None else tuple(plan)
    outcome = World(seed, chosen).run()
    _forget()
    return outcome


def _forget() -> None:
    """Tasks of dead brokers are collected here, where what they have to say does not matter."""
    hook, logger = sys.unraisablehook, logging.getLogger("asyncio")
    level = logger.level
    sys.unraisablehook = lambda _: None
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)


def shrink(seed: int, broken: str) -> tuple[Outcome, tuple[Fault, ...]]:
    """The fewest faults found with which the same invariant still breaks."""
    plan, tries = plan_of(seed), 0
    best = simulate(seed, plan)
    again = True
    while again and tries < MOST_TRIES:
        again = False
        for place in reversed(range(len(plan))):
            tries += 1
            fewer = (*plan[:place], *plan[place + 1 :])
            outcome = simulate(seed, fewer)
            if outcome.violation is not None and outcome.violation[0] == broken:
                plan, best, again = fewer, outcome, True
    return best, plan


def _tell(outcome: Outcome, *, whole: bool) -> None:
    if outcome.violation is None:
        print(f"seed {outcome.seed}: held; {', '.join(outcome.states)}; {outcome.steps} steps; {outcome.hash[:16]}")
        if whole:
            print("\n".join(outcome.trace))
        return
    name, message = outcome.violation
    print(f"seed {outcome.seed}: {name}: {message}", flush=True)
    best, plan = shrink(outcome.seed, name)
    print(f"  with {len(plan)} of {outcome.faults} faults: {', '.join(map(str, plan))}")
    print("\n".join(f"  {line}" for line in best.trace), flush=True)


def seeds_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def quiet() -> None:
    """Controllers say a lot about faults; what they call bugs is heard by the world. `simulate` collects garbage."""
    logging.getLogger("broker").addHandler(logging.NullHandler())
    logging.lastResort = None
    gc.disable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=range(20), help="e.g. 0-199")
    parser.add_argument("--one", type=int, help="only this seed")
    parser.add_argument("--trace", action="store_true", help="print the trace also of a seed that held")
    asked = parser.parse_args()
    quiet()
    begun = told = time.monotonic()
    summary: dict[str, Any] = {"seeds": 0, "violations": 0, "steps": 0}
    for seed in asked.seeds if asked.one is None else (asked.one,):
        outcome = simulate(seed)
        summary["seeds"] += 1
        summary["steps"] += outcome.steps
        summary["violations"] += outcome.violation is not None
        if outcome.violation is not None or asked.one is not None:
            _tell(outcome, whole=asked.trace)
        elif time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"seed {seed}: {summary}", flush=True)
    print(json.dumps({**summary, "seconds": round(time.monotonic() - begun, 1)}))
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
