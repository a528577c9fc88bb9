"""Synthetic spot traces with the spells that public traces show: many short ones, and few long ones."""

from collections.abc import Callable, Sequence
from math import log

from broker.simulation.traces import Trace

ON_DEMAND_USD = 2.0
SPOT_SHARE = 0.35
"""Mean spot price as a share of the on-demand price."""
LARGEST_CHANGE = 0.1
"""Largest change of a spot price at once, as a share of it."""
PRICE_CHANGE_S = 6 * 3600.0
"""Mean time between two changes of a spot price."""
SPELLS_S = {True: (2400.0, 32_400.0), False: (1500.0, 14_400.0)}
"""Mean seconds of short and long spells with spot on sale (True) and sold out (False); half of the spells are short."""

Draw = Callable[[], float]
"""Returns a random number from 0 to 1, without 1."""


def synthetic_traces(names: Sequence[str], duration_s: float, draw: Draw, *, tick_s: int = 600) -> list[Trace]:
    """Return one trace for each name. Zones are independent of each other."""
    return [_trace(name, int(duration_s // tick_s), tick_s, draw) for name in names]


def _trace(name: str, ticks: int, tick_s: int, draw: Draw) -> Trace:
    available, prices = list[bool](), list[float]()
    is_up, price = draw() < 0.6, ON_DEMAND_USD * SPOT_SHARE
    while len(available) < ticks:
        mean_s = SPELLS_S[is_up][draw() < 0.5]
        available += [is_up] * max(1, round(-log(1 - draw()) * mean_s / tick_s))
        is_up = not is_up
    for _ in range(ticks):
        if draw() < tick_s / PRICE_CHANGE_S:
            price *= 1 + LARGEST_CHANGE * (2 * draw() - 1)
            price = min(max(price, 0.2 * ON_DEMAND_USD), 0.6 * ON_DEMAND_USD)
        prices.append(round(price, 4))
    return Trace(
        name=name, tick_s=tick_s, available=tuple(available[:ticks]), spot_usd=tuple(prices),
        on_demand_usd=ON_DEMAND_USD,
    )  # fmt: skip
