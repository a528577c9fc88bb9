"""`gpubroker compare`: runs side by side in the terminal and as JSON."""

import asyncio

from tests.cli.conftest import GOOD, Shell
from tests.web.test_pages import trained


async def test_runs_are_compared_by_results_and_differences(shell: Shell) -> None:
    first = await trained(shell.api)
    spec = shell.spec(GOOD.replace("cap_usd: 5", "cap_usd: 7"))
    made = await asyncio.to_thread(shell.run, "submit", spec, "--yes", "--detach", "--json")
    second = made.document["id"]
    ran = await asyncio.to_thread(shell.run, "compare", first, second, "--json")
    assert ran.code == 0
    runs, differences = ran.document["runs"], ran.document["differences"]
    assert [(run["job"], run["step"], run["loss"]) for run in runs] == [(first, 17, 2.5), (second, 0, None)]
    assert {"path": "cap_usd", "values": ["5", "7"]} in differences
    shown = await asyncio.to_thread(shell.run, "compare", first, second)
    for text in ("17 of 45", "2.5000", "cap_usd", f"/ui/compare?jobs={first},{second}"):
        assert text in shown.out


async def test_one_run_or_nine_are_refused(shell: Shell) -> None:
    ids = ["a" * 12 + letter for letter in "abcdefghi"]
    for jobs in (ids[:1], [ids[0], ids[0]], ids):
        ran = await asyncio.to_thread(shell.run, "compare", *jobs)
        assert ran.code == 2
        assert "name 2 to 8 different jobs" in ran.err
