"""What to bid for a machine that is taken away when somebody bids more."""

from decimal import ROUND_CEILING, Decimal
from math import log

OUTBID_PER_HOUR = 1.0
"""Evictions an hour of a machine held at the floor price itself [assumed]: it is the first to go."""
PRICE_STEP = 0.05
"""Head-room, as a share of the floor, that makes evictions e times rarer [assumed]."""
CENTS = Decimal("0.001")
"""Bids are made in tenths of a cent, rounded up."""


def bid(floor: Decimal, on_demand: Decimal | None, restart_s: float) -> Decimal:
    """$/h to offer for a machine whose lowest winning bid is `floor`, all in one unit (per GPU or per machine).

    What is bid is paid. With head-room h an hour costs `floor (1 + h)`, and evictions at `OUTBID_PER_HOUR exp(-h /
    PRICE_STEP)` each lose `restart_s` that are paid as well. The sum is least, to first order in h, at

        h = PRICE_STEP log(OUTBID_PER_HOUR restart_s / 3600 / PRICE_STEP),    at least 0,

    so nothing is added where a restart is cheap. Never above on-demand, which nobody can outbid.
    """
    urge = OUTBID_PER_HOUR * restart_s / 3600 / PRICE_STEP
    room = Decimal(repr(round(PRICE_STEP * log(urge), 6))) if urge > 1 else Decimal(0)
    offered = (floor * (1 + room)).quantize(CENTS, rounding=ROUND_CEILING)
    return offered if on_demand is None else min(offered, on_demand)
