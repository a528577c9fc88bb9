"""The list of scenarios."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.reliability.figures import Figures

MODULES = ("clocks", "database", "host", "storage")
"""Modules of this package that hold scenarios."""
Run = Callable[[Figures], Awaitable[None]]
"""Raises AssertionError or TimeoutError if the outcome is not the expected one."""


@dataclass(frozen=True)
class Scenario:
    """A fault of the host and its expected outcome."""

    name: str
    expected: str
    run: Run


_scenarios: dict[str, Scenario] = {}


def scenario(expected: str, name: str = "") -> Callable[[Run], Run]:
    """Register a scenario under its function's name, or under `name`."""

    def register(run: Run) -> Run:
        own = name or run.__name__
        _scenarios[own] = Scenario(own, expected, run)
        return run

    return register


def scenarios() -> dict[str, Scenario]:
    """Return all scenarios by name."""
    for module in MODULES:
        importlib.import_module(f"tests.reliability.{module}")
    return dict(_scenarios)
