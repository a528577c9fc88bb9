"""The page of invoices: the table against the ledger, faults next to their fields, and nothing left behind."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from broker.domain.ids import InstanceName
from broker.domain.job import AttemptState, Handle
from broker.domain.tenancy import Scope
from broker.ports import AuditFilter, Change, Charge, Lane
from broker.web.pages import invoice
from tests.api.harness import SETTINGS, Running
from tests.conformance.samples import HOUR, admission, claimed_job, in_state, make_line, submitted
from tests.web.visitor import OWN, Visitor

PAGE = "/ui/spend/invoice"


@pytest.fixture
async def boss(api: Running) -> AsyncIterator[Visitor]:
    """Yield a browser that is signed in with the scope `manage`."""
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token("boss", "read", "manage"))
        yield visitor


async def paid(api: Running, usd: str, machine: str) -> str:
    """Charge an attempt on a machine of Vast; return its job's id."""
    store, line = api.service.store, make_line()
    await submitted(store)
    job = await claimed_job(store)
    handle = Handle(provider="simulated", id=machine, name=InstanceName(machine))
    admitted = admission(job)
    assert admitted.admit is not None
    attempt = replace(admitted.admit, line=replace(line, offer=replace(line.offer, cloud="vast")))
    assert await store.apply([replace(admitted, admit=attempt)]) == [True]
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="test", lease_s=HOUR, limit=1)
    training = replace(in_state(leased.attempt, AttemptState.TRAINING), handles=(handle,))
    assert await store.apply([Change(attempt=(leased.attempt, training), due_in_s=HOUR)]) == [True]
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=datetime.now(UTC), usd=Decimal(usd))
    assert await store.charge([charge]) == [True]
    return str(job.id)


def vast(**amounts: str) -> bytes:
    hour_ago = int((datetime.now(UTC) - timedelta(hours=1)).timestamp())
    records = [
        {"type": "charge", "instance_id": name.removeprefix("m"), "amount": usd, "timestamp": hour_ago}
        for name, usd in amounts.items()
    ]
    return json.dumps([*records, {"type": "payment", "amount": "9", "timestamp": hour_ago}]).encode()


def rows(page: str) -> list[list[str]]:
    """Return the texts of the table's cells."""
    found = re.findall(r"<tr>(<td.*)</tr>", page)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in found]


async def test_an_invoice_is_compared_machine_by_machine(api: Running, boss: Visitor) -> None:
    equal, different, unbilled = [await paid(api, usd, name) for usd, name in (("3.004", "1"), ("2", "2"), ("4", "3"))]
    answer = await boss.upload(PAGE, "invoice.json", vast(m1="3.00", m2="2.50", m666="12.5"), cloud="vast")
    assert answer.status == 200
    assert rows(answer.text) == [
        ["666", "–", "12.50", "–", "+12.50", "billed, not in the ledger"],
        ["3", unbilled[:6], "–", "4.00", "−4.00", "in the ledger, not billed"],
        ["2", different[:6], "2.50", "2.00", "+0.5000", "differs"],
        ["1", equal[:6], "3.00", "3.00", "−0.0040", "equal"],
    ]
    assert "vast: 1 of 4 machines agree" in answer.text
    assert "<dt>Billed</dt><dd>$18.00</dd>" in answer.text
    assert '<option value="vast" selected>' in answer.text
    assert "The ledger is that of team default" in answer.text
    tolerant = await boss.upload(PAGE, "invoice.json", vast(m1="3", m2="2.5", m3="4"), cloud="vast", tolerance_usd="1")
    assert "Every machine agrees within $1.00" in tolerant.text
    assert PAGE in (await boss.get("/ui/spend")).text


async def test_each_team_compares_its_own_ledger(api: Running) -> None:
    job = await paid(api, "3", "1")
    rights: tuple[tuple[Scope, bool], ...] = (("manage", False), ("admin", True))
    for scope, shown in rights:
        async with Visitor(api) as visitor:
            await visitor.sign_in(await api.token(f"eve-{shown}", "read", scope, team="other"))
            page = (await visitor.upload(PAGE, "a.json", vast(m1="3"), cloud="vast")).text
        assert (job in page, "machines of other teams count as billed only" in page) == (shown, not shown)


async def test_the_empty_page_says_what_to_do_next(api: Running, boss: Visitor, ada: Visitor) -> None:
    page = (await boss.get(PAGE)).text
    assert "No invoice is compared yet. Download the file" in page
    assert "vast: vastai show invoices --raw" in page
    nothing = await boss.upload(PAGE, "a.json", vast(), cloud="vast", since="2026-01-01", until="2026-02-01")
    assert "Neither side has a machine of vast in this time" in nothing.text
    assert "needs a token with the scope <code>manage</code>" in (await ada.get(PAGE)).text
    assert (await ada.upload(PAGE, "a.json", vast(), cloud="vast")).status == 403


FAULTS: list[tuple[dict[str, str], bytes, str, str]] = [
    ({"cloud": "vast"}, b"no json", "file", "not JSON"),
    ({"cloud": "vast"}, b'[{"instance_id": 1, "amount": "<b>"}]', "file", "is not an amount"),
    ({"cloud": "vast"}, b"[" * 200_000, "file", "nested too deep"),
    ({"cloud": "vast"}, b" " * 200_001, "file", "more than 200000 bytes"),
    ({"cloud": "vast"}, b"[]", "since", "contains no times"),
    ({"cloud": "vast", "since": "2026-01-01"}, b"[]", "until", "contains no times"),
    ({"cloud": "vast", "since": "2026-02-01", "until": "2026-01-01"}, b"[]", "since", "is not before"),
    ({"cloud": "vast", "since": "2020-01-01", "until": "2026-01-01"}, b"[]", "since", "over 366 days"),
    ({"cloud": "vast", "since": "noon"}, b"[]", "since", "is not a time"),
    ({"cloud": "azure"}, b"[]", "cloud", "vast"),
    ({}, b"[]", "cloud", ""),
    ({"cloud": "vast", "tolerance_usd": "NaN"}, b"[]", "tolerance_usd", ""),
    ({"cloud": "vast", "since": "a" * 2000}, b"[]", "file", "no file came"),
]
"""(fields, content of the file, field of the fault, words of the fault)."""


async def test_a_fault_is_shown_next_to_its_field_and_nothing_is_left(api: Running, boss: Visitor) -> None:
    for fields, content, field, words in FAULTS:
        answer = await boss.upload(PAGE, "invoice.json", content, **fields)
        assert answer.status == 422, fields
        (line,) = re.findall(rf'id="fault-{field}" role="alert">([^<]*)<', answer.text)
        assert words in line, fields
        assert 'role="status"' not in answer.text
    assert not SETTINGS.spool.exists() or list(SETTINGS.spool.iterdir()) == []
    entries = await api.service.store.audit(AuditFilter(limit=10))
    assert {entry.action for entry in entries} == {"token.create"}


async def test_a_form_without_a_file_or_cut_off_is_refused(boss: Visitor) -> None:
    head = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    cloud = head.format("cloud", "", "vast")
    file = head.format("file", '; filename="a.json"', "[1]")
    for body in ("", cloud + "--b--\r\n", cloud * 20 + file + "--b--\r\n", cloud + file, "--b\r\n\x00: 1\r\n\r\n"):
        headers = {**OWN, "Content-Type": "multipart/form-data; boundary=b"}
        answer = await boss.raw(PAGE, headers, body.encode())
        assert (answer.status, 'id="fault-file"' in answer.text) == (422, True), body
    assert (await boss.send(PAGE, cloud="vast")).status == 422


async def test_long_tables_and_hostile_machines_are_cut_and_escaped(
    boss: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoice, "SHOWN", 2)
    names = ["<script>alert(1)</script>\x1b[31m", "b" * 5000, "c"]
    now = datetime.now(UTC).isoformat()
    records = [{"podId": name, "totalAmount": 3 - number, "startTime": now} for number, name in enumerate(names)]
    answer = await boss.upload(PAGE, "a.json", json.dumps(records).encode(), cloud="runpod")
    assert "&lt;script&gt;" in answer.text
    assert "<script>alert" not in answer.text
    assert "\x1b" not in answer.text
    assert "b" * (invoice.MACHINE_CHARACTERS + 1) not in answer.text
    assert "2 of 3, the largest differences first" in answer.text
    assert len(rows(answer.text)) == 2
