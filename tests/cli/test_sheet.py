"""Tables in a narrow terminal keep ids, states and money whole, and name the omitted columns."""

import re
from asyncio import to_thread
from decimal import Decimal
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from broker.api.schemas.job_data import JobMachineView
from broker.api.schemas.jobs import JobView
from broker.cli.core import output
from broker.cli.core.table import Column, TerminalTable
from broker.cli.views import job_table
from broker.domain.job import JobState
from tests.cli.conftest import Shell
from tests.cli.test_jobs import submitted
from tests.cli.test_spend import paid

REASON = "no offer fits: " + "every region of every cloud is above the hourly limit; " * 12


def printed(shown: RenderableType, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(shown)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [160, 80, 40])
async def test_ls_keeps_ids_states_and_money(shell: Shell, width: int) -> None:
    await submitted(shell)
    job = JobView.model_validate((await to_thread(shell.run, "ls", "--json")).document["items"][0])
    changes = {
        "name": "a-name-as-long-as-people-make-them-for-runs", "owner": "somebody", "reason": REASON,
        "state": JobState.AWAITING_APPROVAL, "spent_usd": Decimal("1234.5678"), "cap_usd": Decimal(2500),
        "machine": JobMachineView(
            accelerator="a100-80gb-sxm", gpus=8, nodes=2, cloud="runpod", region="us-ks-2", spot=True, simulated=True
        ),
    }  # fmt: skip
    lines = printed(job_table.table([job, job.model_copy(update=changes)]), width)
    text = "\n".join(lines)
    if width >= 80:
        words = (job.id, "awaiting", "$1,234.57", "cynic", "age", "ETA", "runpod (sim)")
        assert all(whole in text for whole in words)
        assert len(lines) <= 1 + 2 + 2 + 2
    assert text.count(job.id) == 2
    assert ("columns hidden (terminal too narrow): " in text) == (width < 160)


@pytest.mark.parametrize("command", ["ls", "offers", "spend", "audit", "quote"])
async def test_eighty_columns_cut_nothing(shell: Shell, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await submitted(shell)
    paying = await paid(shell, "1234.5678", "m1")
    words = [command, *([shell.spec()] if command == "quote" else [])]
    wide = (await to_thread(shell.run, *words)).out
    monkeypatch.setattr(output, "PLAIN_WIDTH", 80)
    narrow = (await to_thread(shell.run, *words)).out
    assert all(len(line) <= 80 for line in narrow.splitlines() if line[:1] in "┏┃┡│├└")
    for whole in (job, paying.job_id, "$1,234.57", "job.submit"):
        assert (whole in narrow) == (whole in wide)
    assert command == "audit" or prices(narrow)
    assert prices(narrow) <= prices(wide)
    assert "…" not in narrow or command in ("ls", "audit")  # whose last column is prose


def prices(shown: str) -> set[str]:
    return set(re.findall(r"\$\d\S*", shown))


def test_the_least_important_columns_go_first() -> None:
    columns = [Column(name="id"), Column(name="age", rank=2), Column(name="why", min_width=6, prose=True, rank=1)]
    sheet = TerminalTable(columns, [("0123456789", "3 min", "word " * 20)])
    assert "left out" not in "".join(printed(sheet, 66))
    assert "columns hidden (terminal too narrow): age; " in " ".join(printed(sheet, 28))
    assert any("0123456789" in line for line in printed(sheet, 18))


def test_no_name_is_broken_inside_a_word() -> None:
    columns = [Column(name="team", min_width=4), Column(name="note", min_width=4, rank=1)]
    sheet = TerminalTable(columns, [("a-team-of-22-characters", "one two three")])
    for width in (60, 40, 28):
        assert any("a-team-of-22-characters" in line for line in printed(sheet, width))
