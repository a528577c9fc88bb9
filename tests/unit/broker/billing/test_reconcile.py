"""An invoice against the ledger: every machine of either side is in one row."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from broker.billing.reconcile import Charged, Invoice, InvoiceLine, InvoiceVerdict, reconcile
from broker.domain.ids import AttemptId, JobId
from broker.domain.money import ZERO
from tests.support.build import at

CENT = Decimal("0.01")


def billed(machine: str, usd: str) -> InvoiceLine:
    return InvoiceLine(machine=machine, usd=Decimal(usd))


def charged(machine: str, usd: str, attempt: str = "a", kind: str = "gpu_1x_a10") -> Charged:
    return Charged(machine=machine, kind=kind, usd=Decimal(usd), job_id=JobId("j"), attempt_id=AttemptId(attempt))


def test_each_kind_of_difference_has_its_name_and_the_largest_comes_first() -> None:
    invoice = Invoice(
        cloud="runpod",
        lines=(billed("same", "1.00"), billed("more", "2.50"), billed("more", "0.50"), billed("leaked", "9")),
    )
    ledger = [charged("same", "1.005"), charged("more", "2"), charged("unbilled", "4", "b"), charged("", "1", "c")]
    made = reconcile(invoice, ledger, CENT)
    assert [(row.machine, row.verdict, row.usd) for row in made.rows] == [
        ("leaked", InvoiceVerdict.ONLY_INVOICE, Decimal(9)),
        ("unbilled", InvoiceVerdict.ONLY_LEDGER, Decimal(-4)),
        ("(none of attempt c)", InvoiceVerdict.ONLY_LEDGER, Decimal(-1)),
        ("more", InvoiceVerdict.DIFFERENT, Decimal(1)),
        ("same", InvoiceVerdict.EQUAL, Decimal("-0.005")),
    ]
    assert not made.agrees
    assert made.rows[1].attempt_id == "b"
    assert made.rows[0].attempt_id is None


def test_a_condensed_invoice_has_a_line_for_each_machine_and_day() -> None:
    def line(machine: str, usd: str, start: int | None, end: int | None = None) -> InvoiceLine:
        since, until = (None if seconds is None else at(seconds) for seconds in (start, end))
        return InvoiceLine(machine=machine, usd=Decimal(usd), since=since, until=until, text="an hour")

    day = 86_400
    lines = (
        line("a", "1", 7200, 9000), line("a", "2", 3600), line("a", "4", 2 * day), line("b", "8", 0),
        line("b", "1", None), line("b", "2", None, day),
    )  # fmt: skip
    invoice = Invoice(cloud="vast", lines=lines, by_machine=False, ignored=3)
    short = invoice.condensed()
    assert [(row.machine, row.usd, row.since, row.until) for row in short.lines] == [
        ("a", Decimal(3), at(3600), at(9000)), ("a", Decimal(4), at(2 * day), None), ("b", Decimal(8), at(0), None),
        ("b", Decimal(3), None, at(day)),
    ]  # fmt: skip
    assert (short.window, short.by_machine, short.ignored) == (invoice.window, False, 3)
    assert reconcile(short, [charged("", "9")], CENT) == reconcile(invoice, [charged("", "9")], CENT)


def test_the_window_of_lines_without_an_end_includes_their_last_day() -> None:
    start = InvoiceLine(machine="a", usd=ZERO, since=at(0))
    assert Invoice(cloud="vast", lines=(start,)).window == (at(0), at(86_400))
    ended = InvoiceLine(machine="a", usd=ZERO, since=at(0), until=at(60))
    assert Invoice(cloud="vast", lines=(start, ended)).window == (at(0), at(60))
    assert Invoice(cloud="vast", lines=(billed("a", "1"),)).window is None


def test_within_the_tolerance_all_agree() -> None:
    made = reconcile(Invoice(cloud="aws", lines=(billed("i-1", "1.01"),)), [charged("i-1", "1")], CENT)
    assert made.agrees
    assert (made.invoice_usd, made.ledger_usd) == (Decimal("1.01"), Decimal(1))


def test_an_invoice_without_machines_is_compared_by_kind() -> None:
    invoice = Invoice(cloud="lambda", lines=(billed("gpu_1x_a10", "3"),), by_machine=False)
    made = reconcile(invoice, [charged("m1", "1", "a"), charged("m2", "2", "b")], CENT)
    assert [(row.machine, row.verdict, row.attempt_id) for row in made.rows] == [
        ("gpu_1x_a10", InvoiceVerdict.EQUAL, None)
    ]


def test_the_window_of_an_invoice_is_what_its_lines_cover() -> None:
    lines = (
        InvoiceLine(machine="a", usd=ZERO, since=at(5), until=at(9)),
        InvoiceLine(machine="b", usd=ZERO, since=at(2)),
        InvoiceLine(machine="c", usd=ZERO),
    )
    assert Invoice(cloud="aws", lines=lines).window == (at(2), at(9))
    assert Invoice(cloud="aws", lines=lines[2:]).window is None


MONEY = st.decimals(min_value=-10, max_value=1000, places=4, allow_nan=False)
SIDE = st.lists(st.tuples(st.sampled_from("abcdef"), MONEY), max_size=12)


@given(SIDE, SIDE)
def test_no_dollar_of_either_side_is_left_out(
    theirs: list[tuple[str, Decimal]], ours: list[tuple[str, Decimal]]
) -> None:
    invoice = Invoice(cloud="x", lines=tuple(InvoiceLine(machine=m, usd=v) for m, v in theirs))
    ledger = [Charged(machine=m, kind="k", usd=v, job_id=JobId("j"), attempt_id=AttemptId(m)) for m, v in ours]
    made = reconcile(invoice, ledger, ZERO)
    assert made.invoice_usd == sum((v for _, v in theirs), ZERO)
    assert made.ledger_usd == sum((v for _, v in ours), ZERO)
    assert {row.machine for row in made.rows} == {m for m, _ in (*theirs, *ours)}
    assert all(row.verdict is not InvoiceVerdict.EQUAL or row.usd == 0 for row in made.rows)
