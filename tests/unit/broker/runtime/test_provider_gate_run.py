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
    status, calls = run(tmp_path)
    assert (status, {call.partition(" ")[2] for call in calls}) == (0, {told})
    targets = [call.partition(" ")[0] for call in calls]
    one_by_one = [target for target in targets if target not in ("bake", "simulations")]
    assert one_by_one == ["venv", "lint", "browser", "clouds-test", "test", "test-slow", "kills"]
    assert targets.index("venv") < targets.index("bake") < targets.index("clouds-test")
    assert targets.index("browser") < targets.index("simulations") < targets.index("test")


def test_one_failure_fails_the_gate_and_the_rest_is_run(tmp_path: Path) -> None:
    status, calls = run(tmp_path, broken="lint")
    assert (status, len(calls)) == (1, 9)


def test_simulations_that_fail_fail_the_gate(tmp_path: Path) -> None:
    status, calls = run(tmp_path, broken="simulations")
    assert (status, len(calls)) == (1, 9)


def test_missing_tools_skip_a_test_but_fail_the_provider_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no rsync here"):
        cannot(RuntimeError("no rsync here"))
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(AssertionError, match="no rsync here"):
        cannot(RuntimeError("no rsync here"))
