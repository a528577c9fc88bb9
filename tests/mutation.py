"""Mutation score of the tests of the rules: mutmut changes one place at a time, and a test should fail each time.

  - `.venv/bin/python -m tests.mutation`: all of it; the last line is one JSON object
  - `.venv/bin/mutmut results; .venv/bin/mutmut show NAME`: afterwards, list the surviving mutants and show one

pyproject.toml, [tool.mutmut], lists the mutated modules and their tests; mutmut's copy lies in mutants/. The exit
status is 1 if a group has a score below `LEAST_PCT`.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings

GROUPS: Mapping[str, tuple[str, ...]] = {
    "lifecycle": (
        *("lifecycle.state_machine", "lifecycle.transitions", "lifecycle.launch", "lifecycle.liveness"),
        "lifecycle.signals",
    ),
    "caps": (
        "billing.accrual",
        "billing.caps",
        "billing.drain",
        "billing.prices",
        "billing.time_limits",
        "policy.budgets",
    ),
    "recovery": ("lifecycle.recovery",),
    "orphans": ("lifecycle.orphans",),
    "circuit_breaker": ("runtime.circuit_breaker",),
}
"""Modules of the package broker."""
LEAST_PCT = 90.0
PACKAGE = "broker."
MUTMUT = str(Path(sys.executable).with_name("mutmut"))


def score(statuses: Iterable[str]) -> dict[str, Any]:
    """Return the score of one group. A mutant that never ends counts as detected, like one that fails; one without a
    test does not.
    """
    found = Counter(statuses)
    killed, timeout, total = found["killed"], found["timeout"], found.total()
    pct = round(100 * (killed + timeout) / total, 1) if total else 0.0
    survived = total - killed - timeout
    return {"mutants": total, "killed": killed, "survived": survived, "timeout": timeout, "score_pct": pct}


def tally(results: str) -> dict[str, dict[str, Any]]:
    """Return the scores by group, from the lines `broker.PACKAGE.MODULE.FUNCTION__mutmut_N: STATUS` of `mutmut
    results`.
    """
    by_module: dict[str, list[str]] = {}
    for line in results.splitlines():
        name, _, status = line.strip().rpartition(": ")
        if name.startswith(PACKAGE):
            by_module.setdefault(".".join(name.removeprefix(PACKAGE).split(".", 2)[:2]), []).append(status)
    return {
        group: score(status for module in modules for status in by_module.get(module, ()))
        for group, modules in GROUPS.items()
    }


def pytest_configure() -> None:
    """Configure mutmut's pytest as a plugin. A failing example is enough and is not minimised, and each mutant gets the
    same examples.
    """
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutation", settings.default, phases=phases, database=None, derandomize=True)
    settings.load_profile("mutation")


def main() -> int:
    shutil.rmtree("mutants", ignore_errors=True)  # otherwise mutmut tests its earlier copy
    subprocess.run([MUTMUT, "run"], check=True)
    results = subprocess.run([MUTMUT, "results", "--all", "true"], check=True, capture_output=True, text=True).stdout
    print("\n".join(line for line in results.splitlines() if not line.endswith(": killed")))
    scores = tally(results)
    print(json.dumps(scores))
    return 0 if all(group["score_pct"] >= LEAST_PCT for group in scores.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
