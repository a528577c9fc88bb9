"""Wrong rules of charging, each in place of one of the product; see `mutants.py`."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from broker.billing.prices import MachineSpan, price_changes, price_now
from broker.controllers.observation.inventory import Inventory
from broker.domain.job import Attempt, PriceChange
from broker.lifecycle.decisions.charge_decision import ChargeFacts, charged_until

Machines = Sequence[MachineSpan]
Changes = Sequence[PriceChange]
_CHANGES = price_changes
_STOOD = Inventory.machine_spans
_UNTIL = charged_until


def rise_from_now(attempt: Attempt, seen: tuple[Any, ...], now: datetime, stood: Machines) -> Changes:
    """Charge a rise as of its listing, not since the charge before."""
    return [replace(change, since=now) for change in _CHANGES(attempt, seen, now, stood)]


def all_prices_move(attempt: Attempt, seen: tuple[Any, ...], now: datetime, stood: Machines) -> Changes:
    """Apply all listed prices, also those that may omit the disk."""
    return _CHANGES(attempt, tuple(replace(one, price_moves=True) for one in seen), now, stood)


def no_falls(attempt: Attempt, seen: tuple[Any, ...], now: datetime, stood: Machines) -> Changes:
    changes = _CHANGES(attempt, seen, now, stood)
    return [change for change in changes if change.usd_per_hour > price_now(attempt)]


def only_listed_machines(inventory: Inventory, attempt: Attempt, *, max_age_s: float) -> Machines:
    """Use only machines of the latest listing."""
    return [one for one in _STOOD(inventory, attempt, max_age_s=max_age_s) if one.until is None]


def charged_while_alone(facts: ChargeFacts) -> datetime:
    """Charge up to the possible end at once, although it is known only at the end of the attempt."""
    return facts.possible_end if facts.possible_end < facts.now else _UNTIL(facts)
