"""A short simulation in every run of the tests; `make reliability` does more. See README.md here."""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.domain.ids import JobId
from tests.sim import invariants, many
from tests.sim.faults import KINDS
from tests.sim.hunting import CAUGHT
from tests.sim.invariants import INVARIANTS
from tests.sim.mutants import MUTANTS
from tests.sim.outcome import LEAK_GOAL_S, LEAK_LIMIT_S, Outcome, never_struck, summary, too_long
from tests.sim.strikes import Strikes

ROOT = Path(__file__).parents[2]


def _run(*words: str) -> Mapping[str, Any]:
    """Run `tests.sim` and return the JSON object of its last line."""
    command = [sys.executable, "-m", "tests.sim", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    totals: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return totals


def test_every_invariant_holds_in_a_sample_of_seeds() -> None:
    totals = _run("--seeds", "commit", "--lifetimes", "20")
    assert totals["violations"] == 0
    assert totals["lifetimes"] >= 20
    assert totals["faults_mean"] >= 1
    assert totals["leaks_long"] == 0
    assert 0 <= totals["leak_age_p50"] <= totals["leak_age_p99"] <= totals["leak_age_max"]


def test_one_seed_is_the_same_story_in_two_processes() -> None:
    assert _run("--seeds", "commit", "--hashes", "2") == {"seeds": 2, "same": 2}


def test_jobs_end_where_every_hint_is_lost() -> None:
    totals = _run("--seeds", "commit", "--lifetimes", "10", "--hints", "dropped")
    assert totals["lifetimes"] + totals["faultless"] == totals["jobs"]
    assert totals["violations"] == totals["leaks_long"] == 0


def test_every_invariant_names_a_mutant_and_every_mutant_an_invariant() -> None:
    caught = json.loads(CAUGHT.read_text())
    assert set(caught) == {mutant.name for mutant in MUTANTS}
    assert {one["by"] for one in caught.values()} == INVARIANTS
    assert [name for name in sorted(INVARIANTS) if name not in (invariants.__doc__ or "")] == []


def test_a_machine_that_leaks_for_too_long_is_reported_by_name() -> None:
    ages = (3.0, LEAK_GOAL_S, LEAK_GOAL_S + 0.1)
    outcome = Outcome(seed=7, violation=None, trace=(), steps=1, faults=0, leak_ages=ages)
    (line,) = too_long(outcome)
    assert line.startswith("seed 7: leak_age:")
    assert summary([outcome], 1.0)["leaks_long"] == 1


@pytest.mark.parametrize(("age_s", "status"), [(LEAK_GOAL_S + 0.1, 0), (LEAK_LIMIT_S, 0), (LEAK_LIMIT_S + 0.1, 1)])
def test_a_run_with_a_leak_that_no_fault_explains_fails(
    monkeypatch: pytest.MonkeyPatch, age_s: float, status: int
) -> None:
    outcome = Outcome(seed=7, violation=None, trace=(), steps=1, faults=0, leak_ages=(age_s,))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    commands = importlib.import_module("tests.sim.__main__")
    monkeypatch.setattr(
        commands.many, "results", lambda *_, **__: iter([many.SimulationResult(outcome=outcome, story="")])
    )
    assert commands.run_seeds(range(7, 8), lifetimes=None, hints=True, processes=1) == status


def test_a_fault_that_finds_nothing_to_strike_is_named() -> None:
    assert set(never_struck(summary([], 1.0))) == set(KINDS)


def test_a_fault_counts_for_the_jobs_that_it_struck() -> None:
    strikes, early, late = Strikes(now=lambda: 5.0), JobId("early"), JobId("late")
    strikes.note("cloud.429")
    strikes.note("preempt", late)
    assert strikes.lifetimes({early: (0.0, 9.0), late: (7.0, 20.0)}) == {"cloud.429": 1, "preempt": 1}
