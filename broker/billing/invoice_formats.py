"""Parses invoices of clouds.

Each reader names the documentation of its format. This module makes no network calls.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from broker.billing.reconcile import Invoice, InvoiceLine
from broker.domain.errors import InvalidInput, Problem

Format = Literal["runpod", "aws", "vast", "lambda"]
EXPORTS: Mapping[Format, str] = {
    "runpod": "api.runpod.io/v2/billing/pods as JSON",
    "aws": "Cost and Usage Report with resource ids, CSV or CSV.gz",
    "vast": "vastai show invoices --raw",
    "lambda": "CSV with instance_type, usd, since, until, copied from the invoice",
}
"""File to give for each cloud."""
GZIP = b"\x1f\x8b"
"""Start of a gzip file."""
MAX_BYTES, PIECE_BYTES = 1 << 30, 1 << 20
MAX_USD = Decimal(10**9)
"""Largest amount of a line. A larger one is a wrong column."""
SHOWN = 60
"""Characters of a wrong value that its error shows."""
_VAST_MACHINE = re.compile(r"\bInstance (\d+)\b", re.IGNORECASE)


def read_invoice(data: bytes, fmt: Format) -> Invoice:
    """Return the invoice in a downloaded file, gzip or not. Raises InvalidInput with the line and the fix."""
    if data.startswith(GZIP):
        data = _unzipped(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _fault(f"byte {error.start} is not UTF-8; give the file as {fmt} exports it") from None
    try:
        return _READERS[fmt](text)
    except csv.Error as error:
        raise _fault(f"not CSV: {error}") from None
    except RecursionError:
        raise _fault(f"is nested too deep; give the file as {fmt} exports it") from None


def _unzipped(data: bytes) -> bytes:
    plain = bytearray()
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            while piece := stream.read(PIECE_BYTES):  # a read allocates all bytes that it may return
                plain += piece
                if len(plain) > MAX_BYTES:
                    raise _fault(f"more than {MAX_BYTES} bytes when unpacked; split it")
    except (OSError, EOFError, zlib.error):
        raise _fault("the gzip file is damaged; download it again") from None
    return bytes(plain)


# --- clouds


def _runpod(text: str) -> Invoice:
    """Parse `GET https://api.runpod.io/v2/billing/pods` (`records`), or the list of REST v1, retired on 2026-12-01.

    Source: schema `ListPodBillingResponse` of RunPod's OpenAPI document of 2026-08-20. Unknown: whether it has pages,
    so a document with fewer records than its `recordCount` is refused.
    """
    lines, ignored, number = [], 0, 0
    for number, row in _rows(text, number_of="record", inside="records"):
        if not row.get("podId"):
            ignored += 1
            continue
        is_new_format = "totalAmount" in row
        amount, since = ("totalAmount", "startTime") if is_new_format else ("amount", "time")
        lines.append(
            InvoiceLine(
                machine=str(row["podId"]), usd=_usd(row.get(amount), f"record {number}: {amount}"),
                since=_time(row.get(since), f"record {number}: {since}"),
                until=_time(row.get("endTime"), f"record {number}: endTime"), text=str(row.get("gpuTypeId") or ""),
            )
        )  # fmt: skip
    document = json.loads(text)
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if isinstance(metadata, dict) and metadata.get("recordCount", number) != number:
        raise _fault(f"{number} of {metadata['recordCount']} records; download all pages into one list of records")
    return Invoice(cloud="runpod", lines=tuple(lines), ignored=ignored)


_CUR_LEGACY = {
    "machine": "lineItem/ResourceId", "usd": "lineItem/UnblendedCost", "since": "lineItem/UsageStartDate",
    "until": "lineItem/UsageEndDate", "text": "lineItem/LineItemDescription", "currency": "lineItem/CurrencyCode",
}  # fmt: skip
_CUR_2 = {
    "machine": "line_item_resource_id", "usd": "line_item_unblended_cost", "since": "line_item_usage_start_date",
    "until": "line_item_usage_end_date", "text": "line_item_line_item_description",
    "currency": "line_item_currency_code",
}  # fmt: skip


def _aws(text: str) -> Invoice:
    """Parse a Cost and Usage Report as CSV with resource ids, legacy or 2.0 (AWS Data Exports, "Line item columns").

    Only lines of EC2 instances (`i-…`) are compared: volumes, traffic and taxes are other resources.
    """
    rows, header = _csv(text)
    names = _CUR_2 if _CUR_2["usd"] in header else _CUR_LEGACY
    missing = [name for key, name in names.items() if key in ("machine", "usd") and name not in header]
    if missing:
        raise _fault(f"no column {missing[0]}; export a Cost and Usage Report with resource ids")
    lines, ignored = [], 0
    for number, row in rows:
        machine = (row.get(names["machine"]) or "").rpartition("/")[2]
        if not machine.startswith("i-"):
            ignored += 1
            continue
        currency = row.get(names["currency"]) or "USD"
        if currency != "USD":
            raise _fault(f"line {number}: the currency is {currency[:SHOWN]}; only USD can be compared")
        lines.append(
            InvoiceLine(
                machine=machine, usd=_usd(row[names["usd"]], f"line {number}: {names['usd']}"),
                since=_time(row.get(names["since"]), f"line {number}: {names['since']}"),
                until=_time(row.get(names["until"]), f"line {number}: {names['until']}"),
                text=row.get(names["text"]) or "",
            )
        )  # fmt: skip
    return Invoice(cloud="aws", lines=tuple(lines), ignored=ignored)


def _vast(text: str) -> Invoice:
    """Parse `vastai show invoices --raw` or `GET /api/v0/invoices` (Vast API reference, "search invoices")."""
    lines, ignored = [], 0
    for number, row in _rows(text, number_of="record", inside="invoices"):
        match = _VAST_MACHINE.search(str(row.get("description") or ""))
        machine = str(row.get("instance_id") or (match[1] if match else ""))
        if not machine or row.get("type") not in (None, "charge"):
            ignored += 1
            continue
        lines.append(
            InvoiceLine(
                machine=machine, usd=_usd(row.get("amount"), f"record {number}: amount"),
                since=_time(row.get("timestamp"), f"record {number}: timestamp"),
                text=str(row.get("description") or ""),
            )
        )  # fmt: skip
    return Invoice(cloud="vast", lines=tuple(lines), ignored=ignored)


def _lambda(text: str) -> Invoice:
    """Parse CSV with instance_type and usd, and since and until if known, copied from the invoice.

    Lambda's weekly invoice has no ids of machines and no published format, so sums by type are compared.
    """
    rows, header = _csv(text)
    for column in ("instance_type", "usd"):
        if column not in header:
            raise _fault(f"no column {column}; give instance_type, usd, since and until, one line per machine type")
    lines = [
        InvoiceLine(
            machine=row["instance_type"], usd=_usd(row["usd"], f"line {number}: usd"),
            since=_time(row.get("since"), f"line {number}: since"),
            until=_time(row.get("until"), f"line {number}: until"),
        )
        for number, row in rows
    ]  # fmt: skip
    return Invoice(cloud="lambda", lines=tuple(lines), by_machine=False)


_READERS: Mapping[Format, Callable[[str], Invoice]] = {
    "runpod": _runpod,
    "aws": _aws,
    "vast": _vast,
    "lambda": _lambda,
}


# --- files


def _rows(text: str, *, number_of: str, inside: str = "") -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the records of a JSON list, or of the list under `inside`."""
    try:
        records = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise _fault(f"not JSON: {error}") from None
    if isinstance(records, dict) and inside in records:
        records = records[inside]
    if not isinstance(records, list):
        raise _fault("must be a JSON list of records")
    for number, row in enumerate(records, start=1):
        if not isinstance(row, dict):
            raise _fault(f"{number_of} {number} is not an object")
        yield number, row


def _csv(text: str) -> tuple[Iterable[tuple[int, dict[str, str]]], frozenset[str]]:
    """Return the rows with their line numbers, and the header."""
    reader = csv.DictReader(io.StringIO(text))
    header = frozenset(reader.fieldnames or ())

    def rows() -> Iterator[tuple[int, dict[str, str]]]:
        for row in reader:
            yield reader.line_num, {key: value or "" for key, value in row.items() if key is not None}

    return rows(), header


def _usd(value: object, where: str) -> Decimal:
    """Return the exact amount: invoices have more digits than cents."""
    try:
        amount = Decimal(str(value).strip().removeprefix("$"))
    except InvalidOperation:
        raise _fault(f"{where}: {_shown(value)} is not an amount") from None
    if not amount.is_finite() or abs(amount) > MAX_USD:
        raise _fault(f"{where}: {_shown(value)} is not an amount")
    return amount


def _time(value: object, where: str) -> datetime | None:
    """Return the time from ISO 8601 or from seconds since 1970; without a zone it is UTC."""
    if value in (None, ""):
        return None
    try:
        if isinstance(value, int | Decimal):
            return datetime.fromtimestamp(float(value), UTC)
        time = datetime.fromisoformat(str(value))
    except (ValueError, OverflowError, OSError):
        raise _fault(f"{where}: {_shown(value)} is not a time; use ISO 8601") from None
    if not 2000 <= time.year < 2200:
        raise _fault(f"{where}: {_shown(value)} is not a time of an invoice")
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _shown(value: object) -> str:
    return repr(value if len(str(value)) <= SHOWN else f"{str(value)[:SHOWN]}…")


def _fault(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="invoice", message=message))
