"""`gpubroker spend` and `reconcile`, for users and scripts."""

import csv
import json
from asyncio import to_thread
from collections.abc import Awaitable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from broker.cli.core.exit_codes import Exit
from broker.domain.job import Attempt, AttemptState, Handle
from broker.ports import Change, Charge, Lane
from tests.cli.conftest import Ran, Shell
from tests.conformance.samples import HOUR, running
from tests.web.seed import fill


async def paid(shell: Shell, usd: str, machine: str, **changes: object) -> Attempt:
    """Return an attempt on `machine` that was charged."""
    store = shell.api.service.store
    attempt, job = await running(store, AttemptState.TRAINING, **changes)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="test", lease_s=HOUR, limit=1)
    handle = Handle(provider="simulated", id=machine, name=attempt.name)
    updated = replace(leased.attempt, handles=(handle,))
    assert await store.apply([Change(attempt=(leased.attempt, updated), due_in_s=HOUR)]) == [True]
    now = datetime.now(UTC)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=now, usd=Decimal(usd))
    assert await store.charge([charge]) == [True]
    return attempt


async def run(shell: Shell, *words: str) -> Ran:
    return await to_thread(shell.run, *words)


async def test_spending_is_grouped_and_adds_up(shell: Shell) -> None:
    first = await paid(shell, "3", "m1")
    second = await paid(shell, "1", "m2", owner="bob")
    ran = await run(shell, "spend", "--json")
    assert [(row["key"], row["usd"]) for row in ran.document["rows"]] == [(first.job_id, "3"), (second.job_id, "1")]
    assert ran.document["total"]["usd"] == "4"
    ran = await run(shell, "spend", "--by", "user", "--user", "bob", "--json")
    assert [row["key"] for row in ran.document["rows"]] == ["default/bob"]
    ran = await run(shell, "spend", "--by", "cloud")
    assert "alpha" in ran.out
    assert "█" in ran.out


async def test_csv_has_every_figure(shell: Shell) -> None:
    await paid(shell, "3", "m1")
    ran = await run(shell, "spend", "--by", "gpu", "--csv")
    (row,) = csv.DictReader(ran.out.splitlines())
    assert (row["by"], row["key"], row["usd"]) == ("gpu", "l40s", "3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--by", "week"), "use one of job, user"),
        (("--csv", "--json"), "choose one"),
        (("--zone", "Mars/Olympus"), "is not a time zone"),
        (("--since", "2026-02-01T00:00:00Z", "--until", "2026-01-01T00:00:00Z"), "is not before"),
        (("--since", "2020-01-01T00:00:00Z"), "over 366 days"),
        (
            ("--since", "yesterday"),
            "--since yesterday: not a time; write it as 2h, 7d, 2026-01-31",
        ),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(shell: Shell, words: tuple[str, ...], message: str) -> None:
    ran = await run(shell, "spend", *words)
    assert ran.code == Exit.BAD_INPUT
    assert message in ran.err


async def test_nothing_spent_is_reported(shell: Shell) -> None:
    assert "nothing was spent" in (await run(shell, "spend")).out


async def test_calibration_judges_finished_jobs_by_their_quotes(shell: Shell) -> None:
    assert "no job finished" in (await run(shell, "calibration")).out
    await fill(shell.api.service.store, None, datetime.now(UTC))
    document = (await run(shell, "calibration", "--json")).document
    assert document["total"]["money"]["judged"] == document["total"]["jobs"] == 1
    assert document["total"]["time"] == {"judged": 0, "within": 0, "median_error": None}
    assert {row["by"] for row in document["rows"]} == {"tier", "gpu", "recipe", "family"}
    shown = (await run(shell, "calibration")).out
    assert "1 of 1" in shown
    assert "unknown" in shown


def invoice(folder: Path, amounts: dict[str, str]) -> str:
    now = datetime.now(UTC) - timedelta(hours=1)
    records = [
        {"type": "charge", "instance_id": machine, "amount": usd, "timestamp": int(now.timestamp())}
        for machine, usd in amounts.items()
    ]
    path = folder / "vast-invoice.json"
    path.write_text(json.dumps(records))
    return str(path)


async def of_vast(shell: Shell, paying: Awaitable[Attempt]) -> Attempt:
    attempt = await paying
    row = shell.api.service.store._state.attempts[attempt.id]  # type: ignore[attr-defined]
    line = replace(row.value.line, offer=replace(row.value.line.offer, cloud="vast"))
    row.value = replace(row.value, line=line)
    return attempt


async def test_an_invoice_that_agrees_is_exit_0(shell: Shell) -> None:
    await of_vast(shell, paid(shell, "3.004", "101"))
    ran = await run(shell, "reconcile", invoice(shell.folder, {"101": "3.00"}), "--json")
    assert ran.code == 0, ran.err
    assert ran.document["agrees"] is True
    assert ran.document["rows"][0]["verdict"] == "equal"


async def test_a_leaked_machine_and_an_unbilled_one_are_found(shell: Shell) -> None:
    attempt = await of_vast(shell, paid(shell, "3", "101"))
    await paid(shell, "5", "not-of-vast")
    file = invoice(shell.folder, {"666": "12.5"})
    ran = await run(shell, "reconcile", file, "--json")
    assert ran.code == Exit.JOB_FAILED
    rows = {row["machine"]: (row["verdict"], float(row["difference_usd"]), row["job"]) for row in ran.document["rows"]}
    assert rows == {"666": ("only_invoice", 12.5, None), "101": ("only_ledger", -3.0, attempt.job_id)}
    ran = await run(shell, "reconcile", file)
    assert "billed, not in the ledger" in ran.out


async def test_bad_invoices_are_refused_with_the_file(shell: Shell) -> None:
    ran = await run(shell, "reconcile", str(shell.folder / "none.json"), "--cloud", "vast")
    assert (ran.code, "No such file" in ran.err) == (Exit.BAD_INPUT, True)
    strange = shell.folder / "bill.json"
    strange.write_text("[")
    ran = await run(shell, "reconcile", str(strange))
    assert "use one of runpod, aws, vast, lambda" in ran.err
    ran = await run(shell, "reconcile", str(strange), "--cloud", "runpod")
    assert (ran.code, "bill.json: not JSON" in ran.err) == (Exit.BAD_INPUT, True)
