"""Bid for a machine that is preempted by a higher bid."""

from decimal import ROUND_CEILING, Decimal
from math import log

OUTBID_PER_HOUR = 1.0
"""Evictions per hour of a machine held at the floor price [assumed]: it is evicted first."""
PRICE_STEP = 0.05
"""Margin above the floor, as a share of it, that makes evictions e times rarer [assumed]."""
TENTH_CENT = Decimal("0.001")
"""Bids are rounded up to tenths of a cent."""


def bid(floor: Decimal, on_demand: Decimal | None, restart_s: float) -> Decimal:
    """Return the bid in $/h for a machine whose lowest winning bid is `floor`, all per GPU or all per machine.

    The bid is the price. With margin h an hour costs `floor (1 + h)`. Evictions at a rate of `OUTBID_PER_HOUR exp(-h /
    PRICE_STEP)` each lose `restart_s`, which are paid too. To first order in h the sum is minimal at

        h = PRICE_STEP log(OUTBID_PER_HOUR restart_s / 3600 / PRICE_STEP),    at least 0,

    so the margin is 0 if a restart is cheap. The bid never exceeds the on-demand price, which cannot be outbid.
    """
    ratio = OUTBID_PER_HOUR * restart_s / 3600 / PRICE_STEP
    margin = Decimal(repr(round(PRICE_STEP * log(ratio), 6))) if ratio > 1 else Decimal(0)
    amount = (floor * (1 + margin)).quantize(TENTH_CENT, rounding=ROUND_CEILING)
    return amount if on_demand is None else min(amount, on_demand)
