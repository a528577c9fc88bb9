"""Runs scenarios, prints a line for each, and their numbers as JSON."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence

from tests.reliability.figures import Figures
from tests.reliability.registry import Scenario, scenarios
from tests.tiers import commit, drawn

PRIVATE = "GPUBROKER_TESTS_PRIVATE_MOUNTS"
"""Set in a process whose mounts no other process sees."""
SCENARIO_S = 300.0
DETAIL = 3000
"""Characters of a failure that are printed."""


def enter_private_mounts() -> None:
    """Run this command again where its mounts are its own; without that, only the scenario of the full home fails."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    argv = ["unshare", *user, "--mount", "--propagation", "private"]
    if os.environ.get(PRIVATE) or subprocess.run([*argv, "true"], capture_output=True, check=False).returncode:
        return
    os.environ[PRIVATE] = "1"
    os.execvp("unshare", [*argv, sys.executable, "-m", "tests.reliability", *sys.argv[1:]])


async def outcome(scenario: Scenario, figures: Figures) -> str:
    """Return why the scenario failed; empty: the outcome is the expected one."""
    try:
        async with asyncio.timeout(SCENARIO_S):
            await scenario.run(figures)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)
        own = next((frame for frame in reversed(place) if "tests/reliability" in frame.filename), place[-1])
        return f"{own.name}, line {own.lineno}: {type(error).__name__}: {error}"[:DETAIL]
    return ""


async def run(chosen: Sequence[Scenario], lanes: int) -> list[str]:
    """Run the scenarios, some at a time, and return the names of those that failed."""
    turns, failed = asyncio.Semaphore(lanes), list[str]()

    async def one(scenario: Scenario) -> None:
        async with turns:
            figures, began = Figures(), time.monotonic()
            problem = await outcome(scenario, figures)
            word = "FAILED" if problem else "passed"
            print(f"{scenario.name:24} {word} {time.monotonic() - began:5.0f} s  {figures.text()}", flush=True)
            if problem:
                print(f"    expected: {scenario.expected}\n    {problem}", flush=True)
                failed.append(scenario.name)

    await asyncio.gather(*(one(scenario) for scenario in chosen))
    return failed


def main() -> int:
    enter_private_mounts()
    known = scenarios()
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(known), help="names of scenarios; all by default")
    parser.add_argument("--sample", type=int, metavar="N", help="N scenarios, chosen by the commit")
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="scenarios at a time")
    options = parser.parse_args()
    names = options.only or list(known)
    if options.sample is not None:
        names = sorted(drawn(names, options.sample, commit()))
    failed = asyncio.run(run([known[name] for name in names], options.lanes))
    print(json.dumps({"scenarios": len(names), "passed": len(names) - len(failed), "failed": failed}))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
