"""Kills real daemons, their database and their connections, and counts the violations.

    .venv/bin/python -m tests.crash --ci                            # what every change has to pass
    .venv/bin/python -m tests.crash --points all --random 100

The last line is one JSON object; the exit status is 1 when anything was lost, doubled, left over or not paid for.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence

from tests.crash.plan import Plan, carry_out
from tests.crash.scenes import commit

SAMPLE = 8
"""A sample holds one point in this number."""
POINTS = {"none": None, "sample": SAMPLE, "all": 1}
LIVES = 6
"""The same for all lives but the plain one with `--ci`."""
CI = {
    "points": "all", "lives": LIVES, "random": 30, "postgres": 5, "fights": 10, "cuts": 5, "checkpoints": 20,
    "homes": 14, "migrations": 2, "terms": 4, "freezes": 4, "disks": 4, "births": 3, "lanes": 3,
}  # fmt: skip
"""Counts for the check of every change. The commit is the seed."""
CI_SAMPLE = {"points": 2, "lives": 2 * LIVES}
"""Counts with `--ci --sample`, which `.ci/run` uses: every second point instead of all."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--points", choices=POINTS, default="none", help="kill before and after every effect and commit, of every life"
    )
    parser.add_argument(
        "--lives", type=int, metavar="N", help="one of N points of the lives with trouble; else as --points"
    )
    for name, what in (
        ("random", "kill -9 of the daemon at random times"),
        ("postgres", "kill -9 of PostgreSQL"),
        ("fights", "two brokers on one database, one frozen past its leases"),
        ("cuts", "rounds of connections that break"),
        ("checkpoints", "kill -9 of a machine that saves, restores or prunes"),
        ("homes", "kill -9 while a home is made, before an effect on one of its files"),
        ("migrations", "kill -9 before and after the commit of a migration"),
        ("terms", "SIGTERM at a point"),
        ("freezes", "of two brokers, one frozen at a point until its leases are the other's"),
        ("births", "a create that arrives after its attempt's end, when its caller is dead"),
        ("disks", "times that the home's disk is full for a while"),
        ("seed", "of all that is drawn"),
    ):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=what)
    parser.add_argument("--lanes", type=int, default=2, metavar="N", help="installations at a time")
    parser.add_argument("--ci", action="store_true", help="what every change has to pass; the seed is its commit")
    parser.add_argument("--sample", action="store_true", help="with --ci: every second point, chosen by the commit")
    options = parser.parse_args(arguments)
    points = POINTS[options.points]
    is_ci, is_sample = vars(options).pop("ci"), vars(options).pop("sample")
    if is_ci:
        vars(options).update(CI, seed=int(commit(), 16))
        points = POINTS["all"]
    if is_sample:
        points, options.lives = CI_SAMPLE["points"], CI_SAMPLE["lives"]
    began = time.monotonic()
    plan = Plan(**vars(options) | {"points": points, "lives": points if options.lives is None else options.lives})
    totals = asyncio.run(carry_out(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    print(json.dumps(totals.report() | {"seconds": round(time.monotonic() - began)}))
    return 1 if totals.broken else 0


if __name__ == "__main__":
    sys.exit(main())
