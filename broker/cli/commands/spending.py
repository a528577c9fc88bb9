"""`gpubroker spend` (spending by group) and `gpubroker reconcile` (a cloud's invoice against the ledger)."""

import csv
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from broker.api.schemas.spending import SpendRowView, SpendView
from broker.billing.invoice_formats import EXPORTS, Format, read_invoice
from broker.billing.reconcile import Charged, Invoice, InvoiceVerdict, Reconciliation, reconcile
from broker.cli.core import formatting
from broker.cli.core.command import Json, client, command
from broker.cli.core.durations import TIME_HELP, past
from broker.cli.core.exit_codes import BadInput, Exit
from broker.cli.core.output import Output
from broker.cli.core.table import Column, TerminalTable
from broker.domain.errors import InvalidInput
from broker.domain.formatting import csv_cell
from broker.domain.money import usd
from broker.domain.spending import SpendBy

BAR = 24
ID = 13
"""Characters of a job id."""
COLUMNS = (
    Column(name="", rank=7),
    Column(name="spent", right=True),
    Column(name="GPU h", right=True, rank=3),
    Column(name="lost", right=True, rank=2),
    Column(name="saved vs. on demand", right=True, rank=1),
    Column(name="saved vs. most expensive", right=True, rank=4),
    Column(name="jobs", right=True, rank=5),
    Column(name="attempts", right=True, rank=6),
)
GROUPS = get_args(SpendBy)
FORMATS = get_args(Format)
Since = Annotated[str | None, typer.Option(metavar="TIME", help=f"Start: {TIME_HELP}. Default: 30 days ago.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help=f"End: {TIME_HELP}. Default: now.")]


@command
async def spend(
    by: Annotated[str, typer.Option(help=f"Group by one of {', '.join(GROUPS)}.")] = "job",
    since: Since = None,
    until: Until = None,
    zone: Annotated[str, typer.Option(help="Time zone of days and months, e.g. Europe/Berlin.")] = "UTC",
    team: Annotated[str | None, typer.Option(help="Only this team.")] = None,
    user: Annotated[str | None, typer.Option(help="Only this user.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write a CSV table to stdout.")] = False,
    as_json: Json = False,
) -> None:
    """Show spending, and the savings against other offers. Work that was lost counts as cost."""
    if by not in GROUPS:
        raise BadInput(f"--by {by}: use one of {', '.join(GROUPS)}")
    if as_csv and as_json:
        raise BadInput("--csv and --json: choose one")
    since, until = past("--since", since), past("--until", until)
    async with client() as c:
        view = await c.spend(by=by, since=since, until=until, zone=zone, team=team, user=user)
    out = Output(as_json=as_json)
    out.document(view)
    if as_csv:
        _csv(view)
    elif not as_json:
        _show(out, view)


def _csv(view: SpendView) -> None:
    """Write every figure as CSV, one line per group, without a total. No cell is a formula."""
    writer = csv.DictWriter(sys.stdout, ["by", *SpendRowView.model_fields], lineterminator="\n")
    writer.writeheader()
    for row in view.rows:
        cells = {"by": view.by} | row.model_dump()
        writer.writerow({name: csv_cell(value) for name, value in cells.items()})


def _show(out: Output, view: SpendView) -> None:
    out.print(f"{view.since:%Y-%m-%d %H:%M} to {view.until:%Y-%m-%d %H:%M} UTC, by {view.by}")
    if not view.rows:
        out.print("nothing was spent")
        return
    highest = max(row.usd for row in view.rows)
    rows = [(row.key, _bar(row.usd, highest), *_cells(row)) for row in view.rows]
    columns = (Column(name=view.by, min_width=ID), *COLUMNS)
    out.print(TerminalTable(columns, rows, total=("total", "", *_cells(view.total))), *_notes(view.total))


def _bar(value: Decimal, highest: Decimal) -> str:
    length = int(value * BAR / highest) if highest else 0
    return "█" * (max(1, length) if value else 0)


def _cells(row: SpendRowView) -> tuple[str, ...]:
    return (
        formatting.money(row.usd),
        formatting.hours_count(row.gpu_hours),
        formatting.money(row.lost_usd),
        formatting.money(row.saved_on_demand_usd) if row.on_demand_of_usd else "–",
        formatting.money(row.saved_dearest_usd) if row.dearest_of_usd else "–",
        str(row.jobs),
        str(row.attempts),
    )


def _notes(total: SpendRowView) -> list[str]:
    """Return the lines below the table: the parts of the total, and the share without a comparison."""
    parts = f"compute {formatting.money(total.compute_usd)}, egress {formatting.money(total.egress_usd)}"
    notes = [f"{parts}, storage {formatting.money(total.storage_usd)}"]
    unknown = total.compute_usd - total.on_demand_of_usd
    if unknown > 0:
        notes.append(f"{formatting.money(unknown)} of compute has no known on-demand price and is not compared")
    return notes


# ---------------------------------------------------------------------------------------------------------- reconcile


@command
async def reconcile_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Invoice file as exported by the cloud.")],
    cloud: Annotated[str, typer.Option(help="; ".join(f"{name}: {what}" for name, what in EXPORTS.items()))] = "",
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"{TIME_HELP}. Default: start of the invoice.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"{TIME_HELP}. Default: end of the invoice.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Per-machine tolerance in dollars.")] = 0.01,
    as_json: Json = False,
) -> None:
    """Compare a cloud's invoice with the ledger, machine by machine. Exit code 1 if they differ."""
    invoice_format = _format(file, cloud)
    try:
        invoice = read_invoice(file.read_bytes(), invoice_format)
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None
    except InvalidInput as error:
        raise BadInput(f"{file}: {error.problems[0].message}") from None
    window = _window(invoice, past("--since", since), past("--until", until))
    async with client() as c:
        page = await c.charges(cloud=invoice.cloud, since=window[0], until=window[1])
    charges = [Charged(**charge.model_dump()) for charge in page.items]
    result = reconcile(invoice, charges, usd(repr(tolerance)))
    out = Output(as_json=as_json)
    out.document(_document(invoice, result))
    _show_result(out, invoice, result)
    if not result.agrees:
        raise typer.Exit(Exit.JOB_FAILED)


def _format(file: Path, cloud: str) -> Format:
    for name in FORMATS:
        if cloud == name or (not cloud and name in file.name.lower()):
            return name  # type: ignore[no-any-return]
    raise BadInput(f"--cloud {cloud or 'is missing'}: use one of {', '.join(FORMATS)}")


def _window(invoice: Invoice, since: str | None, until: str | None) -> tuple[str | None, str | None]:
    """Return the window of the comparison. Raises BadInput if neither the invoice nor the options have one."""
    covered = invoice.window
    if covered is None and (since is None or until is None):
        raise BadInput("the invoice contains no times; give --since and --until")
    start, end = covered or (None, None)
    return since or _iso(start), until or _iso(end)


def _iso(when: datetime | None) -> str | None:
    return when.isoformat() if when is not None else None


def _document(invoice: Invoice, result: Reconciliation) -> dict[str, Any]:
    rows = [
        {
            "machine": row.machine, "verdict": row.verdict.value, "invoice_usd": str(row.invoice_usd),
            "ledger_usd": str(row.ledger_usd), "difference_usd": str(row.usd), "job": row.job_id,
            "attempt": row.attempt_id,
        }
        for row in result.rows
    ]  # fmt: skip
    return {
        "cloud": invoice.cloud, "by_machine": invoice.by_machine, "agrees": result.agrees, "ignored": invoice.ignored,
        "invoice_usd": str(result.invoice_usd), "ledger_usd": str(result.ledger_usd), "rows": rows,
    }  # fmt: skip


WORDS = {
    InvoiceVerdict.EQUAL: "equal",
    InvoiceVerdict.DIFFERENT: "differs",
    InvoiceVerdict.ONLY_INVOICE: "billed, not in the ledger",
    InvoiceVerdict.ONLY_LEDGER: "in the ledger, not billed",
}


def _show_result(out: Output, invoice: Invoice, result: Reconciliation) -> None:
    columns = (
        Column(name="machine" if invoice.by_machine else "type", min_width=ID),
        Column(name="job", rank=1),
        Column(name="invoice", right=True),
        Column(name="ledger", right=True),
        Column(name="difference", right=True),
        Column(name="", min_width=9),
    )
    rows = [
        (
            row.machine,
            row.job_id or "–",
            formatting.money(row.invoice_usd),
            formatting.money(row.ledger_usd),
            formatting.money(row.usd),
            WORDS[row.verdict],
        )
        for row in result.rows
        if row.verdict is not InvoiceVerdict.EQUAL
    ]
    equal = sum(row.verdict is InvoiceVerdict.EQUAL for row in result.rows)
    if rows:
        out.print(TerminalTable(columns, rows))
    out.print(
        f"{invoice.cloud}: {equal} of {len(result.rows)} agree; invoice {formatting.money(result.invoice_usd)}, "
        f"ledger {formatting.money(result.ledger_usd)}; {invoice.ignored} positions belong to no machine"
    )
