"""Registry of attacks. Each is a coroutine function that attacks a daemon for some seconds."""

import importlib
from collections.abc import Awaitable, Callable

from tests.security.abuse.target import Target

MODULES = ("bodies", "fairness", "host", "messages", "quotes", "uploads")
"""Modules of this package that hold attacks."""
Attack = Callable[[Target, float], Awaitable[None]]
"""(target, seconds) -> None. Errors of the attacker's own connections are not faults; the attack ignores them."""
_attacks: dict[str, Attack] = {}


def attack(run: Attack) -> Attack:
    """Register an attack under its function's name."""
    _attacks[run.__name__] = run
    return run


def attacks() -> dict[str, Attack]:
    """Return all attacks by name."""
    for module in MODULES:
        importlib.import_module(f"tests.security.abuse.{module}")
    return dict(_attacks)
