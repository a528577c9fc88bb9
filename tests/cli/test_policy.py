"""Policy files and the display of budgets."""

from asyncio import to_thread
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from broker.cli.core.exit_codes import Exit
from broker.domain.policy import Policy
from broker.ports import Charge
from tests.cli.conftest import Ran, Shell
from tests.conformance.samples import running
from trainer.contract import yaml_document as yamlfile

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "policies").glob("*.yaml"))
TEAM = """\
name: limits
team: default
timezone: Europe/Berlin
budgets:
  - limit_usd: 20
    per: month
    thresholds:
      - { at: 0.1, action: notify }
max_gpus: 8
"""


async def run(shell: Shell, *words: str) -> Ran:
    return await to_thread(shell.run, *words)


def written(shell: Shell, text: str) -> str:
    path = shell.folder / "policy.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_policies(path: Path) -> None:
    Policy.model_validate(yamlfile.parse(path.read_text(), path.name).data)


async def test_a_policy_from_its_file_to_its_end(shell: Shell) -> None:
    file = written(shell, TEAM)
    ran = await run(shell, "policy", "apply", file)
    assert (ran.code, ran.out) == (Exit.OK, "policy limits (team default) is version 1\n")
    written(shell, TEAM.replace("max_gpus: 8", "max_gpus: 4"))
    assert (await run(shell, "policy", "apply", file, "--json")).document["version"] == 2
    listed = await run(shell, "policy", "ls")
    assert "$20.00 per month; 4 GPUs" in listed.out
    shown = await run(shell, "policy", "show", "limits")
    assert Policy.model_validate(yamlfile.parse(shown.out, "shown").data).max_gpus == 4
    assert (await run(shell, "policy", "delete", "limits")).code == Exit.OK
    history = await run(shell, "policy", "history", "limits")
    assert [line.split("  ")[-1] for line in history.out.splitlines()] == [
        "ada: deleted", "ada: $20.00 per month; 4 GPUs", "ada: $20.00 per month; 8 GPUs",
    ]  # fmt: skip
    for command in ("show", "delete"):
        assert (await run(shell, "policy", command, "limits")).code == Exit.NOT_FOUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("per: month", "per: year"), "policy.yaml:6: budgets.0.per"),
        (("limit_usd: 20", "limit_usd: .nan"), "policy.yaml:5: budgets.0.limit_usd"),
        (("at: 0.1", "at: 80"), "policy.yaml:8: budgets.0.thresholds.0.at"),
        (("Europe/Berlin", "Europe/Berln"), "policy.yaml:3: timezone"),
        (("max_gpus", "max_gpu"), "policy.yaml:9: max_gpu"),
        (
            ("team: default", "team: nowhere"),
            "policy.yaml:2: team: no team nowhere; create it with `gpubroker team new nowhere`",
        ),
        (("name: limits", "name: limits\nname: more"), "policy.yaml:2: name: the key is given twice"),
        (("budgets:", "budgets: ["), "policy.yaml:"),
    ],
)
async def test_a_bad_policy_is_refused_with_the_line(shell: Shell, change: tuple[str, str], message: str) -> None:
    file = written(shell, TEAM.replace(*change))
    for command in ("apply", "dry-run"):
        ran = await run(shell, "policy", command, file)
        assert ran.code == Exit.BAD_INPUT
        assert message in ran.err
    assert (await run(shell, "policy", "ls")).out.startswith("no policies")


async def test_a_file_that_cannot_be_read_is_named(shell: Shell) -> None:
    ran = await run(shell, "policy", "apply", "nowhere.yaml")
    assert (ran.code, ran.err) == (Exit.BAD_INPUT, "error: nowhere.yaml: No such file or directory\n")
    path = shell.folder / "policy.yaml"
    path.write_bytes(b"name: \xff")
    assert "byte 6 is not UTF-8" in (await run(shell, "policy", "apply", str(path))).err


async def test_budgets_are_shown_with_bars(shell: Shell) -> None:
    store = shell.api.service.store
    assert "each job's cap" in (await run(shell, "budget")).out
    await run(shell, "policy", "apply", written(shell, TEAM))
    attempt, job = await running(store)
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=datetime.now(UTC), usd=Decimal(5))
    assert await store.charge([charge]) == [True]
    ran = await run(shell, "budget")
    assert "█" * 5 + "▒" * 4 + "·" * 11 + " 48% notify" in ran.out
    assert "team default" in ran.out
    (one,) = (await run(shell, "budget", "--json")).document["items"]
    assert (one["budgets"][0]["charged_usd"], one["outstanding_usd"], one["gpus"]) == ("5", "4.5", 1)


async def test_a_dry_run_is_reported_and_changes_nothing(shell: Shell) -> None:
    ran = await run(shell, "policy", "dry-run", written(shell, TEAM))
    assert "of 0 launches, 0 would have waited" in ran.out
    ran = await run(shell, "policy", "dry-run", written(shell, TEAM), "--json")
    assert ran.document["launches"] == 0
    assert (await run(shell, "policy", "ls", "--json")).document == {"items": []}


async def test_a_job_is_approved_by_its_name(shell: Shell) -> None:
    _, job = await running(shell.api.service.store)
    ran = await run(shell, "approve", "tune", "--up-to", "25")
    assert (ran.code, ran.out) == (Exit.OK, f"job {job.id} (tune) is approved up to $25.00\n")
    ran = await run(shell, "refuse", job.id)
    assert ran.code == Exit.BAD_INPUT
    assert "awaits no approval" in ran.err
    for amount in ("much", "nan", "-1"):
        ran = await run(shell, "approve", "tune", f"--up-to={amount}")
        assert (ran.code, "is not an amount in dollars" in ran.err) == (Exit.BAD_INPUT, True)
    assert (await run(shell, "approve", "unknown")).code == Exit.NOT_FOUND
