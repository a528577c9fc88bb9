"""Sums of a soak outlive the soak, and short runs reach every part."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import soak
from tests.soak import Part, added, alone, behind, main

QUICK, ENDLESS = ("timeit", "-n1", "-r1", "pass"), ("http.server", "0", "--bind", "127.0.0.1")
SCRIPT = f"""
import sys
from tests import soak
soak.PARTS = {{"quick": soak.Part(command=lambda n: {QUICK}), "slow": soak.Part(command=lambda n: {ENDLESS})}}
soak.main(["--only", "quick", "slow", "--totals", sys.argv[1]])
"""


def parts(**commands: Sequence[str]) -> dict[str, Part]:
    return {name: Part(command=lambda n, words=words: words) for name, words in commands.items()}  # type: ignore[misc]


def test_whole_numbers_are_summed_and_of_measures_the_greatest_is_kept() -> None:
    once = added({}, {"kills": 3, "worst_s": 2.5, "name": "words"})
    assert added(once, {"kills": 4, "worst_s": 1.5, "new": 1}) == {"kills": 7, "worst_s": 2.5, "new": 1}


def test_the_part_that_had_the_least_time_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PARTS", parts(a=QUICK, b=QUICK, c=QUICK))
    totals = {"a": {"seconds": 30}, "b": {"seconds": 20}}
    assert behind(totals, ["a", "b"]) == "b"
    assert behind(totals, ["a", "b", "c"]) == "c"
    assert behind({"a": {"seconds": 0, "rounds": 1}}, ["a", "b"]) == "b"


def test_a_part_that_has_reached_its_goal_leaves_its_time_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Part(command=lambda n: QUICK, goal=("kills", 10))
    monkeypatch.setattr(soak, "PARTS", {"few": few, "more": few})
    totals = {"few": {"seconds": 1, "kills": 10}, "more": {"seconds": 900, "kills": 9}}
    assert behind(totals, ["few", "more"]) == "more"
    totals["more"]["kills"] = 10
    assert behind(totals, ["few", "more"]) == "few"


def test_a_second_run_continues_with_the_sums_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PARTS", parts(one=QUICK))
    file = tmp_path / "totals.json"
    for rounds in (1, 2):
        assert soak.soak(file, ["one"], 0.0) == 0
        assert json.loads(file.read_text())["one"]["rounds"] == rounds


def test_a_round_that_breaks_is_counted_and_its_words_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PARTS", parts(one=("no_such_module",)))
    assert soak.soak(tmp_path / "totals.json", ["one"], 0.0) == 1
    assert json.loads((tmp_path / "totals.json").read_text())["one"]["failed_rounds"] == 1
    assert "no_such_module" in (tmp_path / "one-0.log").read_text()


def test_a_soak_that_is_killed_keeps_its_sums_and_takes_its_round_along(tmp_path: Path) -> None:
    file = tmp_path / "totals.json"
    running = subprocess.Popen([sys.executable, "-c", SCRIPT, str(file)], stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert b"quick: held" in running.stdout.readline()
    (endless,) = until(lambda: psutil.Process(running.pid).children())
    until(lambda: ENDLESS[0] in endless.cmdline())
    with pytest.raises(SystemExit, match="another soak"):
        main(["--totals", str(file)])
    running.kill()
    running.communicate(timeout=300)
    endless.wait(300)
    assert json.loads(file.read_text())["quick"]["rounds"] == 1
    with alone(tmp_path):
        pass


def until(fact: Callable[[], Any]) -> Any:
    """Wait until another process has done something: until `fact` returns a value."""
    deadline = time.monotonic() + 300
    while not (value := fact()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
