"""The outcome of one simulated installation, and the summary of many."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.sim.faults import KINDS
from tests.sim.measures import percentile

LEAK_GOAL_S = 180.0
"""Seconds for which a machine without an owner may run at most, counted while a broker could act."""
LEAK_LIMIT_S = 300.0
"""Seconds above which a leak fails the run. It exceeds the goal, because one in 15,000 lifetimes passes that goal while
half of all calls fail for minutes.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a simulation. `violation`: (invariant, description); None: all invariants held."""

    seed: int
    violation: tuple[str, str] | None
    trace: tuple[str, ...]
    steps: int
    faults: int
    """Number of faults of the plan."""
    states: tuple[str, ...] = ()
    """Final states of all submitted jobs."""
    lives: tuple[int, ...] = ()
    """Number of faults that each ended job met. Faults of brokers, cloud, database and blob store count while the job
    lived. Faults of a machine or of a user count for their own job."""
    leak_ages: tuple[float, ...] = ()
    leak_ages_raw: tuple[float, ...] = ()
    detects: tuple[float, ...] = ()
    detects_raw: tuple[float, ...] = ()
    """Virtual seconds: see `Measures`."""
    strikes: Mapping[str, int] = field(default_factory=dict)
    """Number of finished jobs by the kind of fault that struck them."""

    @property
    def hash(self) -> str:
        return hashlib.sha256("\n".join((*self.trace, str(self.steps))).encode()).hexdigest()

    @property
    def long_leaks(self) -> tuple[float, ...]:
        """Return ages of leaks that lasted too long, counted while a broker could act."""
        return tuple(age for age in self.leak_ages if age > LEAK_GOAL_S)

    @property
    def leaked(self) -> bool:
        """Return True if a leak lasted longer than any fault explains."""
        return any(age > LEAK_LIMIT_S for age in self.leak_ages)

    @property
    def lifetimes(self) -> int:
        """Return the number of finished jobs that met a fault."""
        return sum(met > 0 for met in self.lives)

    def without_trace(self) -> "Outcome":
        """Return the outcome without its trace, because thousands of traces would fill the memory."""
        return Outcome(**{**vars(self), "trace": ()})


def summary(done: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the figures. `leak_age_*`, `detect_*`: virtual seconds, see README.md; `lifetimes_per_s`: real seconds."""
    leaks = [age for outcome in done for age in outcome.leak_ages]
    raw = [age for outcome in done for age in outcome.leak_ages_raw]
    detects = [age for outcome in done for age in outcome.detects]
    detects_raw = [age for outcome in done for age in outcome.detects_raw]
    lives = [met for outcome in done for met in outcome.lives]
    lifetimes = sum(outcome.lifetimes for outcome in done)
    faults = Counter(dict.fromkeys(KINDS, 0))
    for outcome in done:
        faults.update(outcome.strikes)
    return {
        "installations": len(done),
        "jobs": sum(len(outcome.states) for outcome in done),
        "lifetimes": lifetimes,
        "faultless": len(lives) - lifetimes,
        "faults_mean": round(sum(lives) / max(1, lifetimes), 2),
        "violations": sum(outcome.violation is not None for outcome in done),
        "leak_age_p50": round(percentile(leaks, 0.5), 1),
        "leak_age_p99": round(percentile(leaks, 0.99), 1),
        "leak_age_max": round(max(leaks, default=0.0), 1),
        "leak_age_raw_max": round(max(raw, default=0.0), 1),
        "leaks_long": sum(len(outcome.long_leaks) for outcome in done),
        "detect_p95_s": round(percentile(detects, 0.95), 1),
        "detect_raw_p95_s": round(percentile(detects_raw, 0.95), 1),
        "lifetimes_per_s": round(lifetimes / max(seconds, 1e-9), 2),
        "faults": {kind: faults[kind] for kind in sorted(faults)},
    }


def too_long(outcome: Outcome) -> list[str]:
    """Return one line for each leak above the goal."""
    what = "a machine without an owner ran for"
    return [f"seed {outcome.seed}: leak_age: {what} {age:.1f} s while somebody could act" for age in outcome.long_leaks]


def never_struck(totals: Mapping[str, Any]) -> list[str]:
    """Return the kinds of faults of a `summary` that struck no job."""
    return [kind for kind, struck in totals["faults"].items() if not struck]
