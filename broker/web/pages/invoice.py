"""Invoices: a cloud's file against the ledger, machine by machine. Nothing of it is stored."""

from decimal import Decimal
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from broker.api.core.problems import StorageFull, TooLarge, TooMany
from broker.api.http.context import STREAMS
from broker.api.schemas.queries import Instant
from broker.billing.invoice_formats import EXPORTS, Format
from broker.billing.reconcile import Invoice, InvoiceVerdict, Reconciliation
from broker.domain.errors import Busy, InvalidInput
from broker.domain.spending import SpendWindow
from broker.web.browser import Visit
from broker.web.file_form import chunks, form_with_file
from broker.web.pages.team.layout import by_field, checked, echoed
from broker.web.routes import Routes
from trainer.contract.base import Config

routes = Routes()
INVOICE = "/ui/spend/invoice"
SHOWN = 500
"""Maximum number of rows of a table."""
MACHINE_CHARACTERS = 120
DEFAULTS = {"cloud": "", "since": "", "until": "", "tolerance_usd": "0.01"}
WORDS = {
    InvoiceVerdict.EQUAL: "equal",
    InvoiceVerdict.DIFFERENT: "differs",
    InvoiceVerdict.ONLY_INVOICE: "billed, not in the ledger",
    InvoiceVerdict.ONLY_LEDGER: "in the ledger, not billed",
}


class InvoiceForm(Config):
    """Fields of the form, in addition to the file."""

    cloud: Format
    since: Instant | None = None
    until: Instant | None = None
    tolerance_usd: Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)] = Decimal("0.01")
    """Difference of a machine up to which both sides agree."""


@routes.get(INVOICE)
async def invoice(visit: Visit) -> web.Response:
    """Show the form for a cloud's invoice."""
    given = {name: visit.request.query.get(name, default) for name, default in DEFAULTS.items()}
    return _page(visit, given, {})


@routes.post(INVOICE, scope="manage", runs_to_end=False, streams=True)
async def compare(visit: Visit) -> web.Response:
    """Compare the file of the form with the ledger."""
    given = dict(DEFAULTS)
    try:
        async with visit.request.app[STREAMS].slot(visit.caller, visit.session.token):
            fields, part = await form_with_file(visit.request, "file")
            given |= echoed({name: text.strip() for name, text in fields.items() if name in DEFAULTS})
            form = checked(InvoiceForm, {name: text for name, text in given.items() if text})
            read = await visit.content.read_invoice(visit.caller, form.cloud, chunks(part))
        window, result = await visit.service.spending.reconciled(
            visit.caller, read, form.since, form.until,
            tolerance_usd=form.tolerance_usd, run=visit.service.quotes.threads.of_team(visit.caller.team),
        )  # fmt: skip
    except InvalidInput as error:
        return _page(visit, given, _faults(error), status=422)
    except (TooLarge, TooMany, StorageFull, Busy) as error:
        return _page(visit, given, {"file": str(error)}, status=422)
    return _page(visit, given, {}, _result(read, window, result, form.tolerance_usd))


def _faults(error: InvalidInput) -> dict[str, str]:
    """Return the lines by field of the form. Errors about the invoice are about its file."""
    lines: dict[str, str] = {}
    for name, line in by_field(error).items():
        lines.setdefault(name if name in DEFAULTS else "file", line)
    return lines


def _page(
    visit: Visit, given: dict[str, str], faults: dict[str, str], result: dict[str, Any] | None = None, status: int = 200
) -> web.Response:
    can_manage = visit.caller.admin or "manage" in visit.caller.scopes
    return visit.page(
        "invoice.html", status, given=given, faults=faults, result=result, exports=EXPORTS, can_manage=can_manage
    )


def _result(read: Invoice, window: SpendWindow, result: Reconciliation, tolerance: Decimal) -> dict[str, Any]:
    """Return the figures of the comparison. Each table has at most SHOWN rows."""
    different = [row for row in result.rows if row.verdict is not InvoiceVerdict.EQUAL]
    equal = [row for row in result.rows if row.verdict is InvoiceVerdict.EQUAL]
    return {
        "invoice": read, "window": window, "invoice_usd": result.invoice_usd, "ledger_usd": result.ledger_usd,
        "tables": [(rows[:SHOWN], len(rows)) for rows in (different, equal)], "tolerance": tolerance, "words": WORDS,
        "machine_characters": MACHINE_CHARACTERS,
    }  # fmt: skip
