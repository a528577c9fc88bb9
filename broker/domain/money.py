"""Money is Decimal dollars, kept to the micro-dollar, and always rounded against ourselves."""

from decimal import ROUND_CEILING, Decimal

MICRO = Decimal("0.000001")
ZERO = Decimal(0)


def usd(value: Decimal | int | str) -> Decimal:
    """`value` in whole micro-dollars, rounded up. Floats are refused: they are not money."""
    if isinstance(value, float):
        raise TypeError("money from a float; pass a Decimal or a string")
    return Decimal(value).quantize(MICRO, rounding=ROUND_CEILING)


def from_float(value: float) -> Decimal:
    """Money out of an estimate, which is a float by nature."""
    return usd(repr(value))


def show(value: Decimal) -> str:
    """For people: at least cents, four digits below a dollar."""
    return f"${value:,.2f}" if abs(value) >= 10 else f"${value:.4f}"
