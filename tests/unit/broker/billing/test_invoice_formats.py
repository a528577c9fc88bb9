"""Invoices of clouds, as their documentation shows them, and files that are not invoices."""

import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from broker.billing.invoice_formats import Format, read_invoice
from broker.domain.errors import InvalidInput

RUNPOD = [
    {"amount": 100.5, "diskSpaceBilledGb": 50, "gpuTypeId": "NVIDIA L40S", "podId": "xedezhzb9la3ye",
     "time": "2023-01-01T00:00:00Z", "timeBilledMs": 3600000},
    {"amount": 1, "endpointId": "abc", "time": "2023-01-01T00:00:00Z"},
]  # fmt: skip
VAST = [
    {"type": "charge", "description": "Instance 123 GPU charge: hours * $/hr", "timestamp": 1633036800,
     "quantity": "10.000", "rate": "0.1000", "amount": "1.000", "instance_id": 123},
    {"type": "charge", "description": "Instance 123 bandwidth", "timestamp": 1633036800, "amount": "0.25"},
    {"type": "payment", "description": "Stripe", "timestamp": 1633036800, "amount": "10"},
]  # fmt: skip
CUR = (
    "identity/LineItemId,lineItem/UsageStartDate,lineItem/UsageEndDate,lineItem/ResourceId,lineItem/UnblendedCost,"
    "lineItem/CurrencyCode,lineItem/LineItemDescription\n"
    "a,2026-01-01T00:00:00Z,2026-01-01T01:00:00Z,i-0abc,1.8610000000,USD,$1.861 per g6e.xlarge\n"
    "b,2026-01-01T00:00:00Z,2026-01-01T01:00:00Z,vol-1,0.01,USD,gp3\n"
)
CUR_2 = (
    "line_item_resource_id,line_item_unblended_cost,line_item_usage_start_date\n"
    "arn:aws:ec2:us-east-1:1:instance/i-0abc,2.5,2026-01-01 00:00:00\n"
)


def test_a_pod_history_of_runpod() -> None:
    invoice = read_invoice(json.dumps(RUNPOD).encode(), "runpod")
    (line,) = invoice.lines
    assert (line.machine, line.usd, invoice.ignored) == ("xedezhzb9la3ye", Decimal("100.5"), 1)
    assert line.since == datetime(2023, 1, 1, tzinfo=UTC)


def test_runpod_rest_v2_billing() -> None:
    records = [
        {
            "startTime": "2026-11-01T00:00:00Z", "endTime": "2026-11-02T00:00:00Z", "podId": "p", "totalAmount": 1.25,
            "gpuAmount": 1, "cpuAmount": 0, "diskAmount": 0.25,
        },
        {"podId": None, "totalAmount": 1},
    ]  # fmt: skip
    for extra in ({}, {"metadata": {"recordCount": 2}}, {"metadata": {}}, {"metadata": None}):
        invoice = read_invoice(json.dumps({"records": records} | extra).encode(), "runpod")
        (line,) = invoice.lines
        assert (line.machine, line.usd, invoice.ignored) == ("p", Decimal("1.25"), 1)
        assert (line.since, line.until) == (datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC))
    with pytest.raises(InvalidInput, match="2 of 3 records"):
        read_invoice(json.dumps({"records": records, "metadata": {"recordCount": 3}}).encode(), "runpod")


@pytest.mark.parametrize("whole", [VAST, {"invoices": VAST, "current": {}}])
def test_charges_of_vast_by_id_or_description(whole: object) -> None:
    invoice = read_invoice(json.dumps(whole).encode(), "vast")
    assert [(line.machine, line.usd) for line in invoice.lines] == [("123", Decimal("1.000")), ("123", Decimal("0.25"))]
    assert invoice.ignored == 1
    assert invoice.lines[0].since == datetime(2021, 9, 30, 21, 20, tzinfo=UTC)


@pytest.mark.parametrize(("text", "usd", "ignored"), [(CUR, "1.861", 1), (CUR_2, "2.5", 0)])
def test_a_cost_and_usage_report_of_aws(text: str, usd: str, ignored: int) -> None:
    for data in (text.encode(), gzip.compress(text.encode(), mtime=0)):
        invoice = read_invoice(data, "aws")
        assert [(line.machine, line.usd) for line in invoice.lines] == [("i-0abc", Decimal(usd))]
        assert (invoice.ignored, invoice.lines[0].since) == (ignored, datetime(2026, 1, 1, tzinfo=UTC))


def test_positions_of_lambda_are_by_type() -> None:
    invoice = read_invoice(b"instance_type,usd,since,until\ngpu_1x_a10,$7.50,2026-01-01,2026-01-08\n", "lambda")
    assert not invoice.by_machine
    assert [(line.machine, line.usd) for line in invoice.lines] == [("gpu_1x_a10", Decimal("7.50"))]


@pytest.mark.parametrize(
    ("data", "fmt", "message"),
    [
        (b"\xff\xfe", "aws", "is not UTF-8"),
        (gzip.compress(b"x", mtime=0)[:-4], "aws", "is damaged"),
        (gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 20, "aws", "is damaged"),
        (b"no json", "runpod", "not JSON"),
        (b'{"a": 1}', "runpod", "must be a JSON list"),
        (b"[1]", "vast", "record 1 is not an object"),
        (b'[{"podId": "p", "amount": "much"}]', "runpod", "record 1: amount: 'much' is not an amount"),
        (b'[{"podId": "p", "amount": "NaN"}]', "runpod", "is not an amount"),
        (b'[{"podId": "p", "amount": 1, "time": "noon"}]', "runpod", "record 1: time: 'noon' is not a time"),
        (b'[{"instance_id": 1, "amount": 1, "timestamp": 99999999999999999}]', "vast", "is not a time"),
        (b"a,b\n1,2\n", "aws", "no column lineItem/ResourceId"),
        (CUR.replace("USD,$", "CNY,$").encode(), "aws", "line 2: the currency is CNY"),
        (b"instance_type,usd\na\rb,1\n", "lambda", "not CSV: new-line character"),
        (b"instance_type,usd\na," + b"x" * 100, "lambda", f"line 2: usd: '{'x' * 60}…' is not an amount"),
        (b"[" * 100_000, "runpod", "is nested too deep"),
        (b'[{"podId": "p", "amount": 1e999999}]', "runpod", "is not an amount"),
        (b"instance_type,usd,since\na,1,0001-01-01\n", "lambda", "line 2: since: '0001-01-01' is not a time of"),
        (b"type,usd\n", "lambda", "no column instance_type"),
        (b"instance_type,usd\na,b\n", "lambda", "line 2: usd: 'b' is not an amount"),
    ],
)
def test_a_malformed_invoice_is_refused_with_its_line(data: bytes, fmt: Format, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_invoice(data, fmt)
    assert message in str(refused.value)


def test_an_invoice_too_large_when_unpacked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.billing.invoice_formats.MAX_BYTES", 10)
    with pytest.raises(InvalidInput, match="more than 10 bytes when unpacked"):
        read_invoice(gzip.compress(b"[" + b" " * 100 + b"]"), "runpod")
