"""Wrong rules for prices that move, each in the place of one of the product; see `mutants.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from broker.decide.prices import price_changes, price_now
from broker.domain.job import Attempt, PriceChange

Born = Mapping[str, datetime]
Changes = Sequence[PriceChange]
_CHANGES = price_changes


def rise_from_now(attempt: Attempt, seen: tuple[Any, ...], now: datetime, born_after: Born) -> Changes:
    """As if it had risen when it was seen."""
    return [replace(one, since=now) for one in _CHANGES(attempt, seen, now, born_after)]


def all_prices_move(attempt: Attempt, seen: tuple[Any, ...], now: datetime, born_after: Born) -> Changes:
    """Also those that may leave the disk out."""
    return _CHANGES(attempt, tuple(replace(one, price_moves=True) for one in seen), now, born_after)


def no_falls(attempt: Attempt, seen: tuple[Any, ...], now: datetime, born_after: Born) -> Changes:
    found = _CHANGES(attempt, seen, now, born_after)
    return [one for one in found if one.usd_per_hour > price_now(attempt)]
