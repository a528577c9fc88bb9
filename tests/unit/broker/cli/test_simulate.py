"""`gpubroker simulate` works without files and daemon, and names a wrong option or trace in one line."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.core.exit_codes import Exit
from broker.cli.main import app
from broker.notify import plot

HEAD = "t_s,available,spot_usd,ondemand_usd\n"
SHORT = ("--work", "3h", "--deadline", "5h", "--windows", "2")


def simulate(*words: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    return ran.exit_code, ran.stdout, ran.stderr


def pools(folder: Path, *names: str) -> str:
    """Write traces of 30 h in which the first zone has no spot and the others always have."""
    for name in names:
        is_up = int(name != names[0])
        (folder / f"{name}.csv").write_text(f"{HEAD}0,{is_up},0.5,2\n108000,{is_up},0.5,2\n")
    return str(folder)


@pytest.mark.parametrize("policy", ["auto", "uniform-progress", "greedy", "on-demand", "optimum"])
def test_a_policy_is_compared_with_the_optimum(policy: str) -> None:
    code, text, _ = simulate("--policy", policy, "--regions", "a,b", *SHORT, "--json")
    assert code == Exit.OK
    document = json.loads(text)
    assert (document["policy"], document["n"], document["misses"]) == (policy, 2, 0)
    assert document["cost_over_optimum"] >= 0.999
    assert document["cost_over_optimum"] <= document["on_demand_over_optimum"] + 0.2
    for run in document["runs"]:
        assert run["zones"] == ["a", "b"]
        timeline = run["timeline"]
        assert timeline[0]["from_s"] == 0
        assert all(one["to_s"] == other["from_s"] for one, other in itertools.pairwise(timeline))
    if policy == "optimum":
        assert document["cost_over_optimum"] == pytest.approx(1, abs=0.001)


def test_the_same_seed_draws_the_same_traces() -> None:
    assert simulate(*SHORT, "--json") == simulate(*SHORT, "--json")
    assert simulate(*SHORT, "--json") != simulate(*SHORT, "--json", "--seed", "2")


def test_zones_of_one_gpu_are_one_market(tmp_path: Path) -> None:
    """The job runs on spot in the zone that has it; a market of the other zone alone has none."""
    folder = pools(tmp_path, "us-west-2a_v100_1", "us-west-2b_v100_1")
    code, text, _ = simulate("--trace", folder, *SHORT)
    assert code == Exit.OK
    assert "us-west-2b |SSSS" in text
    _, text, _ = simulate("--trace", folder, *SHORT, "--regions", "us-west-2", "--json")
    assert json.loads(text)["runs"][0]["zones"] == ["us-west-2a", "us-west-2b"]
    _, text, _ = simulate("--trace", folder, *SHORT, "--regions", "us-west-2a", "--json")
    alone = json.loads(text)["runs"][0]
    assert alone["zones"] == ["us-west-2a"]
    assert {span["machine"] for span in alone["timeline"]} <= {"none", "on-demand"}


def test_gpus_are_separate_markets(tmp_path: Path) -> None:
    folder = pools(tmp_path, "a_v100_1", "a_k80_1", "a_k80_8")
    _, text, _ = simulate("--trace", folder, "--gpu", "K80", *SHORT)
    assert [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")] == [
        "k80_1", "k80_8", "all"
    ]  # fmt: skip


def test_a_market_that_is_too_short_is_named(tmp_path: Path) -> None:
    folder = pools(tmp_path, "a_v100_1", "a_k80_1")
    (tmp_path / "a_k80_1.csv").write_text(f"{HEAD}0,1,0.5,2\n7200,1,0.5,2\n")
    code, text, _ = simulate("--trace", folder, *SHORT)
    assert code == Exit.OK
    assert "left out k80_1: its traces are shorter than the deadline" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "best"], "--policy best: no such policy; use one of auto, uniform-progress"),
        (["--work", "two days"], "--work two days: not a duration; write it as 90s, 15m, 2h, 1h30m or 7d"),
        (["--work", "0"], "--work 0: nothing to do; give"),
        (["--deadline", "48h"], "--deadline 48h: work and one changeover take 48.1h; give"),
        (["--work", "9m", "--deadline", "19m", "--changeover", "6m"], "--deadline: 1 ticks of 600 s are too few"),
        (["--deadline", "60d"], "--deadline 60d: longer than 1000h; give"),
        (["--plot", "x.gif"], "--plot x.gif: unknown kind of picture; end"),
        (["--trace", "/nowhere"], "/nowhere: No such file or directory; name"),
        (["--trace", "FOLDER"], "--deadline 72h: the longest trace has 30h; give"),
        (["--trace", "FOLDER", "--gpu", "h100"], "--gpu h100: no trace fits; choose among k80, v100"),
        (["--trace", "FOLDER", "--regions", "us"], "--regions us: no trace fits; choose among a"),
    ],
)  # fmt: skip
def test_a_fault_is_named_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    folder = pools(tmp_path, "a_v100_1", "a_k80_1")
    code, text, error = simulate(*(folder if word == "FOLDER" else word for word in words))
    assert (code, text) == (Exit.BAD_INPUT, "")
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_a_broken_trace_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "pool.csv").write_text(f"{HEAD}0,1,0.5,2\n600,1,,2\n")
    code, text, error = simulate("--trace", str(tmp_path))
    assert (code, text) == (Exit.BAD_INPUT, "")
    problem = "spot_usd '' is not a number of at least 0; correct or remove the row"
    assert error == f"error: {tmp_path}/pool.csv:3: {problem}\n"


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_the_timeline_is_drawn(name: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, text, _ = simulate(*SHORT, "--plot", str(tmp_path / name))
    assert code == Exit.OK
    assert f"plot: {tmp_path / name}" in text
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    code, _, error = simulate(*SHORT, "--plot", str(tmp_path / "missing" / "a.png"))
    assert code == Exit.BAD_INPUT
    assert "No such file or directory" in error
    monkeypatch.setattr(plot, "_figure", lambda: None)
    code, _, error = simulate(*SHORT, "--plot", str(tmp_path / "a.png"))
    assert code == Exit.BAD_INPUT
    assert "pip install 'gpubroker[plots]'" in error
