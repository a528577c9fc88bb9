"""Simulates many seeds in parallel processes. The results do not depend on the number of processes."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.sim.outcome import Outcome
from tests.sim.run import quiet, shrink, simulate

CHUNK = 4
"""Seeds that a process takes at once."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Result of one seed. `story`: text about a broken invariant and the fewest faults that break it; empty: none."""

    outcome: Outcome
    story: str


def results(seeds: Iterable[int], *, hints: bool, processes: int | None = None) -> Iterator[SimulationResult]:
    """Yield the results in the order of the seeds. `processes`: None for one on each core."""
    workers = pool(processes or os.cpu_count() or 1)
    try:
        yield from workers.map(partial(result_of, hints=hints), seeds, chunksize=CHUNK)
    finally:
        workers.shutdown(cancel_futures=True)


def pool(processes: int) -> ProcessPoolExecutor:
    """Return a pool of spawned, not forked processes, so that each has its own imports."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), quiet)


def result_of(seed: int, *, hints: bool) -> SimulationResult:
    outcome = simulate(seed, hints=hints)
    story = "" if outcome.violation is None else shortest_story(outcome, hints=hints)
    return SimulationResult(outcome=outcome.without_trace(), story=story)


def shortest_story(outcome: Outcome, *, hints: bool) -> str:
    """Return the broken rule, and the shortest list of faults that breaks it."""
    assert outcome.violation is not None
    name, message = outcome.violation
    best, plan = shrink(outcome.seed, name, hints=hints)
    faults = f"  with {len(plan)} of {outcome.faults} faults: {', '.join(map(str, plan))}"
    trace = (f"  {line}" for line in best.trace)
    return "\n".join((f"seed {outcome.seed}: {name}: {message}", faults, *trace))


def hashes(seeds: Iterable[int]) -> dict[int, str]:
    return {seed: simulate(seed).hash for seed in seeds}


def differing(seeds: range) -> list[int]:
    """Return seeds whose story differs in a second process that simulated other seeds before."""
    with pool(2) as two:
        once, again = two.map(hashes, (seeds, seeds[::-1]))
    return [seed for seed in seeds if once[seed] != again[seed]]
