"""A sample of the faults of the daemon's host, chosen by the commit; `python -m tests.reliability` runs all of them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.reliability.registry import scenarios


def test_a_fault_of_the_host_has_the_expected_outcome() -> None:
    argv = [sys.executable, "-m", "tests.reliability", "--sample", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["scenarios"], summary["passed"]) == (1, 1)


def test_the_page_lists_every_scenario() -> None:
    page = Path("tests/reliability/README.md").read_text()
    assert [name for name in scenarios() if f"`{name}`" not in page] == []
