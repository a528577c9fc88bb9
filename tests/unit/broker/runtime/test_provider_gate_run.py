"""`.ci/run`, with a `make` that only notes how it was called."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clouds.required import REQUIRED, cannot

RUN = Path(__file__).parents[4] / ".ci/run"
MAKE = f"""#!/bin/sh
for target; do :; done
echo "$target CI=$CI {REQUIRED}=${REQUIRED}" >> "$NOTES"
[ "$target" != "$BROKEN" ]
"""


def run(folder: Path, *, broken: str = "") -> tuple[int, list[str]]:
    """Return the exit status, and each call's target with the variables of its environment."""
    (folder / "make").write_text(MAKE)
    (folder / "make").chmod(0o755)
    notes = folder / "notes"
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(notes), "BROKEN": broken}
    done = subprocess.run([RUN], env=env, capture_output=True)
    return done.returncode, notes.read_text().splitlines()


def test_the_machines_are_baked_before_the_tests_that_need_their_rsync(tmp_path: Path) -> None:
    told = f"CI=true {REQUIRED}=1"
    targets = ("venv", "lint", "browser", "clouds-test", "test", "test-slow", "reliability")
    every = [f"{target} {told}" for target in targets]
    assert run(tmp_path) == (0, every)


def test_one_failure_fails_the_gate_and_the_rest_is_run(tmp_path: Path) -> None:
    status, calls = run(tmp_path, broken="lint")
    assert (status, len(calls)) == (1, 7)


def test_missing_tools_skip_a_test_but_fail_the_provider_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no rsync here"):
        cannot(RuntimeError("no rsync here"))
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(AssertionError, match="no rsync here"):
        cannot(RuntimeError("no rsync here"))
