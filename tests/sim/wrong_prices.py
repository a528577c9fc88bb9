"""Wrong rules for prices that move, each in the place of one of the product; see `mutants.py`."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from broker.decide.prices import price_change, price_now
from broker.domain.job import Attempt, PriceChange

Born = Mapping[str, datetime]
_CHANGE = price_change


def rise_from_now(attempt: Attempt, seen: tuple[Any, ...], now: datetime, born_after: Born) -> PriceChange | None:
    """As if it had risen when it was seen."""
    found = _CHANGE(attempt, seen, now, born_after)
    return found and replace(found, since=now)


def all_prices_move(attempt: Attempt, seen: tuple[Any, ...], now: datetime, born_after: Born) -> PriceChange | None:
    """Also those that may leave the disk out."""
    return _CHANGE(attempt, tuple(replace(one, price_moves=True) for one in seen), now, born_after)


def no_falls(attempt: Attempt, seen: tuple[Any, ...], now: datetime, born_after: Born) -> PriceChange | None:
    found = _CHANGE(attempt, seen, now, born_after)
    return found if found and found.usd_per_hour > price_now(attempt) else None
