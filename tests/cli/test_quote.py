"""`gpubroker quote` with --explain, --what-if and --json, and its errors for wrong input."""

import json
import re
from asyncio import to_thread
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.core.exit_codes import Exit
from broker.cli.main import app
from broker.domain.workload import SpotHours
from broker.estimator.planning.corrections import Corrections
from broker.estimator.preemption_rate import place_of_offer
from broker.notify import plot
from broker.ports import JobFilter
from tests.cli.conftest import GOOD, Ran, Shell

WHAT_IF = ("--what-if", "gpus=1,2,4,8")


async def quoted(shell: Shell, *words: str, spec: str = GOOD) -> Ran:
    return await to_thread(shell.run, "quote", shell.spec(spec), *words)


def refused(ran: Ran, *words: str) -> None:
    """Assert that the output is one line which names the cause."""
    assert ran.code == Exit.BAD_INPUT, ran.out + ran.err
    assert ran.out == ""
    assert len(ran.err.strip().splitlines()) == 1
    for word in words:
        assert word in ran.err


async def test_explain_adds_up_to_the_quote_and_names_every_offer(shell: Shell) -> None:
    ran = await quoted(shell, "--explain", "--json")
    assert ran.code == 0, ran.err
    kept = [line for line in ran.document["lines"] if line["verdict"] == "kept"]
    assert kept
    for line in kept:
        assert sum(line["hours"].values()) == pytest.approx(line["hours_p50"])
        assert sum(map(float, line["costs"].values())) == pytest.approx(float(line["usd_p50"]), abs=1e-5)
        assert float(line["usd_p50"]) <= float(line["usd_p90"])
    output = (await quoted(shell, "--explain")).out
    assert "  time  boot" in output
    assert "  $     machines" in output
    assert "assumed: weights and data download at 200 MB/s" in output
    flat = "".join(output.replace("│", " ").split())
    assert all(line["offer"]["id"] in flat for line in ran.document["lines"])


async def test_a_quote_compares_its_policy_with_on_demand_only(shell: Shell) -> None:
    deadline = datetime.now(UTC) + timedelta(days=2)
    spec = GOOD + f"deadline: {deadline.isoformat()}\n"
    document = (await quoted(shell, "--json", spec=spec)).document
    chosen, on_demand = document["chosen"], document["on_demand"]
    assert float(chosen["usd_p50"]) <= float(on_demand["usd_p50"])
    assert 0.9 <= chosen["deadline_chance"] <= 1
    assert datetime.fromisoformat(document["latest_on_demand_start"]) < deadline
    text = (await quoted(shell, spec=spec)).out
    assert re.search(r"chosen policy: \$\S+ expected \(P10 – P90: \$\S+ – \$\S+\), ends 20\d\d-", text)
    assert re.search(r"on demand only: \$.* in time with a chance of at least (100|9\d) %", text)
    assert re.search(r"latest start on demand for the deadline: 20\d\d-\d\d-\d\d \d\d:\d\dZ", text)
    plain = (await quoted(shell)).out
    assert "chosen policy" in plain
    assert "in time with" not in plain
    assert "latest start" not in plain


async def test_a_quote_says_what_its_speeds_were_compared_with(shell: Shell) -> None:
    """The table has a mark and a note, and the JSON document a field."""
    market = shell.api.market
    real = [replace(item, emulated_on=None) for item in market.items if item.accelerator in ("l40s", "h100-sxm")]
    market.items = [*real[:1], next(item for item in real if item.accelerator != real[0].accelerator)]
    lines = (await quoted(shell, "--json")).document["lines"]
    assert {line["tier"] for line in lines} == {"unchecked"}, "SmolLM2-135M is bound by the host that launches it"
    assert all("a layer and pass; interval for a host twice as slow" in line["evidence"] for line in lines)
    output = (await quoted(shell)).out
    assert output.count(" *") == 2
    assert "speed of 1: unchecked (" in output
    long = GOOD.replace("HuggingFaceTB/SmolLM2-135M", "mistralai/Mistral-7B-v0.1")
    long += "  method: {kind: qlora}\n  max_length: 8192\n  global_batch: 8\n"
    rows = "word,definition\n" + f"word,{'what it means to a cynic ' * 780}\n" * 10
    (shell.folder / "words.csv").write_text(rows)
    path = shell.spec(long, None)
    known = (await to_thread(shell.run, "quote", path, "--json")).document["lines"]
    assert {line["offer"]["accelerator"]: line["tier"] for line in known} == {
        "l40s": "transferred", "h100-sxm": "transferred",
    }  # fmt: skip
    output = (await to_thread(shell.run, "quote", path)).out
    assert " *" not in output
    record = "90 % interval, which held 90 % of runs of unseen groups"
    assert f"transferred (fitted on runs on the h100-sxm; {record})" in output


async def test_explain_shows_the_history_of_own_spot_machines(shell: Shell) -> None:
    market = shell.api.market
    market.items = [replace(item, id=f"o{n}") for n, item in enumerate(o for o in market.items if o.spot)]
    before = (await quoted(shell, "--json")).document
    spots = {
        place_of_offer(item): SpotHours(
            provider=item.provider, cloud=item.cloud, region=item.region, accelerator=item.accelerator,
            hours=40.0, preemptions=60,
        )
        for item in market.items
    }  # fmt: skip
    shell.api.service.quotes.learned = lambda: Corrections(spots=spots)
    after = (await quoted(shell, "--explain", "--json")).document
    was = {line["offer"]["id"]: line for line in before["lines"] if line["verdict"] == "kept"}
    now = {line["offer"]["id"]: line for line in after["lines"] if line["verdict"] == "kept"}
    assert now
    for name, line in now.items():
        assert "60 in 40 h of own" in line["reason"]
        assert line["hours"]["preemptions"] > was[name]["hours"]["preemptions"]
        assert float(line["usd_p50"]) >= float(was[name]["usd_p50"])
    shown = (await quoted(shell, "--explain")).out
    assert "60in40hofown" in "".join(shown.replace("│", " ").split())


async def test_scaling_table_is_printed_written_as_json_and_plotted(shell: Shell) -> None:
    pytest.importorskip("matplotlib")
    picture = shell.folder / "scaling.png"
    ran = await quoted(shell, *WHAT_IF, "--gpu", "L40S", "--plot", str(picture), "--json")
    assert ran.code == 0, ran.err
    assert [row["gpus"] for row in ran.document["points"]] == [1, 2, 4, 8]
    assert picture.read_bytes().startswith(b"\x89PNG")
    ran = await quoted(shell, *WHAT_IF)
    assert "MFU" in ran.out
    assert "assumed: " in ran.out
    assert not await shell.api.service.store.jobs(JobFilter())


async def test_scaling_table_skips_unknown_hardware(shell: Shell) -> None:
    market = shell.api.market
    market.items = [replace(one, accelerator="tpu-v9", id=f"t{n}") for n, one in enumerate(market.items)]
    refused(await quoted(shell, *WHAT_IF), "no offer has a GPU; give --gpu")
    assert (await quoted(shell, *WHAT_IF, "--gpu", "L4", "--json")).document["gpu"] == "l4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--what-if", "gpus=0"), "0 is not a number of GPUs"),
        (("--what-if", "gpus=abc"), "abc is not a number of GPUs"),
        (("--what-if", "gpus="), "write 1,2,4,8"),
        (("--what-if", "gpus=4,2"), "ascending"),
        ((*WHAT_IF, "--gpu", "abacus"), "--gpu abacus: not known"),
        ((*WHAT_IF, "--gpu", ""), "--gpu"),
        (("--plot", "x.png"), "--plot requires --what-if"),
        (("--gpu", "L4"), "--gpu requires --what-if"),
        (("--set", "resources.objective=best"), "resources.objective"),
        (("--set", "cap_usd=-1"), "cap_usd"),
        (("--set", "deadline=2020-01-01T00:00:00Z"), "deadline"),
    ],
)
async def test_wrong_input_is_one_line(shell: Shell, words: tuple[str, ...], message: str) -> None:
    refused(await quoted(shell, *words), message)
    ran = await quoted(shell, *words, "--json")
    assert ran.code == Exit.BAD_INPUT
    assert message in json.dumps(ran.document["error"])


async def test_a_plot_that_cannot_be_written_or_drawn_is_one_line(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is one error line; under --json the error is the one document."""
    nowhere = str(tmp_path / "none" / "x.png")
    if plot._figure() is not None:
        refused(await quoted(shell, *WHAT_IF, "--gpu", "L4", "--plot", nowhere), nowhere, "No such file")
        refused(await quoted(shell, *WHAT_IF, "--gpu", "L4", "--plot", str(tmp_path)), "Is a directory")
        assert "error" in (await quoted(shell, *WHAT_IF, "--gpu", "L4", "--plot", nowhere, "--json")).document
    monkeypatch.setattr(plot, "_figure", lambda: None)
    refused(await quoted(shell, *WHAT_IF, "--gpu", "L4", "--plot", nowhere), "pip install 'gpubroker[plots]'")


async def test_a_script_has_nothing_to_scale(shell: Shell) -> None:
    code = shell.folder / "code"
    code.mkdir()
    (code / "main.py").write_text("print('hello')\n")
    script = "name: hello\ncap_usd: 5\nscript:\n  code: code\n  command: [python, main.py]\n"
    refused(await quoted(shell, *WHAT_IF, spec=script), "needs a training job")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "4"), "--gpus: not used with --what-if"),
        (("--sharding", "tensor"), "--sharding: not used with --what-if"),
        (("--stack", "transformers=4.48.1"), "--stack: not used with --what-if"),
        (("--usd-per-gpu-hour", "inf"), "--usd-per-gpu-hour inf"),
        (("--rows", "0"), "--rows 0"),
    ],
)
def test_a_scaling_table_names_the_settings_that_it_ignores(
    own_home: Path, words: tuple[str, ...], message: str
) -> None:
    refused(offline(*WHAT_IF, *words), message)


@pytest.mark.parametrize("words", [("--rows", "5"), ("--plot", "x.png"), ("--global-batch", "8")])
def test_options_of_the_scaling_table_require_what_if(own_home: Path, words: tuple[str, str]) -> None:
    refused(offline(*words), f"{words[0]} requires --what-if")


def test_a_scaling_table_has_the_norms_that_were_asked_for() -> None:
    asked = ("--what-if", "gpus=1", "--method", "qlora", "--global-batch", "4", "--json")
    raised, halved = (offline(*asked, *more).document["points"][0]["need_bytes"] for more in ((), ("--norms", "half")))
    assert raised != halved


def offline(*words: str) -> Ran:
    asked = ["estimate", "mistralai/Mistral-7B-v0.1", "--gpu", "L40S", *words]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    return Ran(code=result.exit_code, out=result.stdout, err=result.stderr)


def test_an_encoder_decoder_is_scaled_by_what_it_reads_and_writes() -> None:
    asked = ["estimate", "google-t5/t5-small", "--seq", "512", "--target-seq", "128", "--gpu", "L40S"]
    done = CliRunner().invoke(app, [*asked, "--what-if", "gpus=1,2", "--rows", "1000", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["tokens_per_row"] == 640
    assert [row["plan"]["parallelism"] for row in document["points"]] == ["single", "ddp"]
