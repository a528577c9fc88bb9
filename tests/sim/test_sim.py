"""A sample of the simulation for every run of the tests; `python -m tests.sim` does more. See README.md here."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPACE = 10_000
"""Samples begin at one of these."""
SAMPLE = 12
"""Houses a run of the tests: about ten seconds."""


def _run(*words: str) -> list[str]:
    """In a process of its own, since PYTHONHASHSEED is read at its start."""
    command = [sys.executable, "-m", "tests.sim", *words]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    return done.stdout.splitlines()


def _first_seed() -> int:
    """Another sample for every commit, the same one for the same commit."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(found.stdout.strip() or "0", 16) % SPACE


def test_every_invariant_holds_in_a_sample_of_houses() -> None:
    first = _first_seed()
    summary = json.loads(_run("--seeds", f"{first}:{first + SAMPLE}")[-1])
    assert summary["violations"] == 0
    assert summary["lifetimes"] >= SAMPLE
    assert 0 < summary["leak_age_p50"] <= summary["leak_age_p99"] <= summary["leak_age_max"]


def test_one_seed_is_the_same_story_in_two_processes() -> None:
    once, again = (_run("--replay", "4")[:-1] for _ in range(2))
    assert once == again
    assert any(" killed after " in line or " fault " in line for line in once)
