"""Wrong rules for prices that move, each in the place of one of the product; see `mutants.py`."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from broker.controllers.inventory import Inventory
from broker.decide.prices import Stood, price_changes, price_now
from broker.domain.job import Attempt, PriceChange

Machines = Sequence[Stood]
Changes = Sequence[PriceChange]
_CHANGES = price_changes
_STOOD = Inventory.stood


def rise_from_now(attempt: Attempt, seen: tuple[Any, ...], now: datetime, stood: Machines) -> Changes:
    """As if it had risen when it was seen."""
    return [replace(one, since=now) for one in _CHANGES(attempt, seen, now, stood)]


def all_prices_move(attempt: Attempt, seen: tuple[Any, ...], now: datetime, stood: Machines) -> Changes:
    """Also those that may leave the disk out."""
    return _CHANGES(attempt, tuple(replace(one, price_moves=True) for one in seen), now, stood)


def no_falls(attempt: Attempt, seen: tuple[Any, ...], now: datetime, stood: Machines) -> Changes:
    found = _CHANGES(attempt, seen, now, stood)
    return [one for one in found if one.usd_per_hour > price_now(attempt)]


def only_those_that_stand(inventory: Inventory, attempt: Attempt, *, max_age_s: float) -> Machines:
    """As if only what the latest listing shows were known."""
    return [one for one in _STOOD(inventory, attempt, max_age_s=max_age_s) if one.until is None]
