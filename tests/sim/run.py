"""Runs of single seeds; `python -m tests.sim` makes many."""

import gc
import logging
import sys
import warnings
from collections.abc import Sequence

from tests.sim.faults import Fault, plan_of
from tests.sim.outcome import Outcome
from tests.sim.world import World

MAX_TRIES = 60
"""Maximum number of runs in which a failing seed is shrunk."""


def simulate(seed: int, plan: Sequence[Fault] | None = None, *, hints: bool = True) -> Outcome:
    """Simulate one installation until all jobs have ended or an invariant breaks. `hints`: False drops all of them."""
    chosen = plan_of(seed) if plan is None else tuple(plan)
    worlds = [World(seed, chosen, hints=hints)]
    outcome = worlds[0].run()
    _forget(worlds)
    return outcome


def _forget(worlds: list[World]) -> None:
    """Collect the tasks of dead brokers here, and ignore their errors."""
    hook, logger = sys.unraisablehook, logging.getLogger("asyncio")
    level = logger.level
    sys.unraisablehook = lambda _: None
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            worlds.clear()
            gc.collect()
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)


def shrink(seed: int, broken: str, *, hints: bool = True) -> tuple[Outcome, tuple[Fault, ...]]:
    """Return the fewest faults found with which the same invariant still breaks."""
    plan, tries = plan_of(seed), 0
    best = simulate(seed, plan, hints=hints)
    again = True
    while again and tries < MAX_TRIES:
        again = False
        for place in reversed(range(len(plan))):
            tries += 1
            fewer = (*plan[:place], *plan[place + 1 :])
            outcome = simulate(seed, fewer, hints=hints)
            if outcome.violation is not None and outcome.violation[0] == broken:
                plan, best, again = fewer, outcome, True
    return best, plan


def quiet() -> None:
    """Silence the controllers' many log lines on faults; the world reads their bugs. `simulate` collects garbage."""
    logging.getLogger("broker").addHandler(logging.NullHandler())
    logging.lastResort = None
    gc.disable()
    gc.freeze()
