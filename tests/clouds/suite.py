"""`make clouds-test`: builds the machine image if needed, runs every test that needs machines, prints one line of JSON.

    python -m tests.clouds.suite [--sample] [PYTEST ARGUMENTS]

`--sample` runs the kill points and the clouds of the first scenario that the commit hash selects, and leaves out the
tests of `LAUNCHES`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.bake import NoBake, bake
from tests.clouds.scenarios.scene import Scene

HERE = Path(__file__).parent
MACHINES = ("test_isolation.py", "test_machines.py", "test_aws.py", "test_together.py")
"""Tests of the machines, which run before the scenarios because the scenarios depend on them."""
LAUNCHES = ("test_sky_machines.py", "test_self_stop.py")
"""Tests of launches without a broker. A sample leaves them out, because its scenarios launch machines too."""


class Tally:
    """Counts of scenarios, and totals of orphans and money as the scenes report them."""

    def __init__(self) -> None:
        self.scenarios = self.passed = self.orphans = 0
        self.equal = True
        self.skipped: set[str] = set()
        Scene.on_end.append(self.add_scene)

    def add_scene(self, scene: Scene) -> None:
        self.orphans += len(scene.orphans())
        self.equal &= all(scene.agrees(*one) for one in scene.money)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.add(str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))
        if "scenarios/" in report.nodeid and report.when == "call":
            self.scenarios += 1
            self.passed += report.passed

    def document(self, seconds: float) -> dict[str, Any]:
        told = {
            "scenarios": self.scenarios, "passed": self.passed, "orphans": self.orphans,
            "ledger_equals_bill": self.equal and self.scenarios > 0, "seconds": round(seconds),
        }  # fmt: skip
        return told | ({"skipped": sorted(self.skipped)} if self.skipped else {})


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    files: tuple[str, ...] = MACHINES
    sample = [argument for argument in arguments if argument == "--sample"]
    arguments = [argument for argument in arguments if argument != "--sample"]
    if not sample:
        os.environ["GPUBROKER_KILL_POINTS"] = "all"
        files += LAUNCHES
    try:
        print(f"machines run over {bake()}", flush=True)
    except NoBake as e:
        print(f"no machines here: {e}", flush=True)
    tally = Tally()
    chosen = arguments or [*(str(HERE / name) for name in files), str(HERE / "scenarios")]
    code = pytest.main(["-v", "--durations=0", "-p", "no:cacheprovider", "-n", "0", *sample, *chosen], plugins=[tally])
    print(json.dumps(tally.document(time.monotonic() - begun)))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
