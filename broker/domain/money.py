"""Money as Decimal dollars, rounded up to a whole micro-dollar, and the entries of the ledger."""

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum

from broker.domain.ids import AttemptId, JobId

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


def format_usd(value: Decimal) -> str:
    """Return the amount for display: two decimals from ten dollars on, four decimals below."""
    return f"${value:,.2f}" if abs(value) >= 10 else f"${value:.4f}"


class LedgerKind(StrEnum):
    RESERVATION = "reservation"
    CHARGE = "charge"
    RELEASE = "release"
    ADJUSTMENT = "adjustment"


class LedgerCategory(StrEnum):
    """Purpose of a charge."""

    COMPUTE = "compute"
    EGRESS = "egress"
    STORAGE = "storage"


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One entry of the append-only ledger.

    All amounts are positive or 0. A release returns the unspent part of the reservation.
    """

    job_id: JobId
    attempt_id: AttemptId | None
    """None: storage, which outlives attempts."""
    kind: LedgerKind
    usd: Decimal
    note: str = ""
    category: LedgerCategory = LedgerCategory.COMPUTE
