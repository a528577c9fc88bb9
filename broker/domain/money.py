"""Money: Decimal dollars, kept to the micro-dollar and always rounded up."""

from decimal import ROUND_CEILING, Decimal

MICRO = Decimal("0.000001")
ZERO = Decimal(0)


def usd(value: Decimal | int | str) -> Decimal:
    """Return `value` in whole micro-dollars, rounded up.

    Floats are refused because they are inexact.
    """
    if isinstance(value, float):
        raise TypeError("money from a float; pass a Decimal or a string")
    return Decimal(value).quantize(MICRO, rounding=ROUND_CEILING)


def from_float(value: float) -> Decimal:
    """Return the money amount of an estimate, which is a float."""
    return usd(repr(value))


def show(value: Decimal) -> str:
    """Return the amount for display: at least cents, four digits below ten dollars."""
    return f"${value:,.2f}" if abs(value) >= 10 else f"${value:.4f}"
