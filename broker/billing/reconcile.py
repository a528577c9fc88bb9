"""Compares a cloud's invoice with the ledger, machine by machine."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum

from broker.domain.ids import AttemptId, JobId
from broker.domain.money import ZERO


@dataclass(frozen=True, kw_only=True)
class InvoiceLine:
    """One line of an invoice, as its cloud writes it."""

    machine: str
    """The cloud's id of the machine; where its invoice has none, the machine's type."""
    usd: Decimal
    """Dollars; negative for a credit."""
    since: datetime | None = None
    until: datetime | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Invoice:
    """An invoice of a cloud.

    `by_machine` False: the cloud bills by machine type, so that only sums per type can be compared.
    """

    cloud: str
    lines: tuple[InvoiceLine, ...]
    by_machine: bool = True
    ignored: int = 0
    """Number of lines that concern no machine (storage, tax, support)."""

    @property
    def window(self) -> tuple[datetime, datetime] | None:
        """The time that its lines cover; None: they contain no times.

        A line without an end may cover the day on which it begins, so the window then ends a day later.
        """
        starts = [line.since for line in self.lines if line.since]
        ends = [line.until or line.since for line in self.lines if line.until or line.since]
        if not starts or not ends:
            return None
        rest = timedelta(0) if any(line.until for line in self.lines) else timedelta(days=1)
        return min(starts), max(end for end in ends if end) + rest

    def condensed(self) -> "Invoice":
        """Return the same invoice with one line for each machine and day, so that its size is bounded by these."""
        lines: dict[tuple[str, date | None], InvoiceLine] = {}
        for line in self.lines:
            key = (line.machine, line.since.date() if line.since else None)
            lines[key] = _joined(lines[key], line) if key in lines else replace(line, text="")
        return replace(self, lines=tuple(lines.values()))


@dataclass(frozen=True, kw_only=True)
class Charged:
    """Charges of the ledger for one machine of an attempt."""

    machine: str
    """The cloud's id; empty: the attempt never had one."""
    kind: str
    """The machine's type, as the cloud names it."""
    usd: Decimal
    job_id: JobId
    attempt_id: AttemptId


class InvoiceVerdict(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    ONLY_INVOICE = "only_invoice"
    """The cloud bills a machine that the ledger does not know: another owner's, or leaked."""
    ONLY_LEDGER = "only_ledger"
    """The ledger has charges that this invoice lacks: not billed yet, or never."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Amounts of the invoice and the ledger for one machine, or for one machine type."""

    machine: str
    verdict: InvoiceVerdict
    invoice_usd: Decimal
    ledger_usd: Decimal
    job_id: JobId | None = None
    attempt_id: AttemptId | None = None
    """The attempt of the machine; None: several attempts or none."""

    @property
    def usd(self) -> Decimal:
        """Invoice minus ledger: positive where the cloud bills more than was charged."""
        return self.invoice_usd - self.ledger_usd


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """All differences, the largest first."""

    rows: tuple[Difference, ...]

    @property
    def invoice_usd(self) -> Decimal:
        return sum((row.invoice_usd for row in self.rows), ZERO)

    @property
    def ledger_usd(self) -> Decimal:
        return sum((row.ledger_usd for row in self.rows), ZERO)

    @property
    def agrees(self) -> bool:
        return all(row.verdict is InvoiceVerdict.EQUAL for row in self.rows)


def reconcile(invoice: Invoice, charged: Sequence[Charged], tolerance_usd: Decimal) -> Reconciliation:
    """Return a row for every machine of either side.

    Amounts that differ by at most `tolerance_usd` are equal, because clouds round.
    """
    billed = _sum((line.machine, line.usd) for line in invoice.lines)
    owner: dict[str, set[tuple[JobId, AttemptId]]] = defaultdict(set)
    for charge in charged:
        owner[_key(invoice, charge)].add((charge.job_id, charge.attempt_id))
    charged_usd = _sum((_key(invoice, charge), charge.usd) for charge in charged)
    rows = []
    for machine in billed.keys() | charged_usd.keys():
        owners = owner[machine]
        job_id, attempt_id = next(iter(owners)) if len(owners) == 1 else (None, None)
        invoiced, ours = billed.get(machine), charged_usd.get(machine)
        rows.append(
            Difference(
                machine=machine,
                verdict=_verdict(invoiced, ours, tolerance_usd),
                invoice_usd=invoiced or ZERO,
                ledger_usd=ours or ZERO,
                job_id=job_id,
                attempt_id=attempt_id,
            )
        )
    rows.sort(key=lambda row: (row.verdict is InvoiceVerdict.EQUAL, -abs(row.usd), row.machine))
    return Reconciliation(rows=tuple(rows))


def _joined(first: InvoiceLine, second: InvoiceLine) -> InvoiceLine:
    """Return two lines of one machine and day as one."""
    return replace(
        first,
        usd=first.usd + second.usd,
        since=min((time for time in (first.since, second.since) if time), default=None),
        until=max((time for time in (first.until, second.until) if time), default=None),
    )


def _key(invoice: Invoice, charge: Charged) -> str:
    return (charge.machine or f"(none of attempt {charge.attempt_id})") if invoice.by_machine else charge.kind


def _sum(pairs: Iterable[tuple[str, Decimal]]) -> dict[str, Decimal]:
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for key, value in pairs:
        sums[key] += value
    return sums


def _verdict(invoiced: Decimal | None, charged: Decimal | None, tolerance: Decimal) -> InvoiceVerdict:
    if abs((invoiced or ZERO) - (charged or ZERO)) <= tolerance:
        return InvoiceVerdict.EQUAL
    if charged is None:
        return InvoiceVerdict.ONLY_INVOICE
    return InvoiceVerdict.ONLY_LEDGER if invoiced is None else InvoiceVerdict.DIFFERENT
