"""The tables of the slow and the sampled tests name what exists, and a sample leaves no parameter out for ever."""

from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", [*tiers.SLOW, *tiers.SAMPLED])
def test_every_entry_names_what_exists(entry: str) -> None:
    path, _, test = entry.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("beginning", tiers.FIRST)
def test_what_begins_first_exists(beginning: str) -> None:
    assert list(ROOT.glob(f"{beginning.rstrip('/')}*"))


def test_the_longest_tests_begin_first_and_others_keep_their_order() -> None:
    tests = ["tests/api/test_b.py::b", "tests/api/test_a.py::a", "tests/sim/test_sim.py::a", "tests/crash/test_c.py::a"]
    assert sorted(tests, key=tiers.turn) == [tests[3], tests[2], *tests[:2]]


@pytest.mark.parametrize("beginning", tiers.ROTATED)
def test_every_rotation_is_of_several_files(beginning: str) -> None:
    assert len(list(ROOT.glob(f"{beginning}*"))) > 1


@pytest.mark.parametrize(
    ("test", "slow"),
    [
        ("tests/crash/test_lives.py::test_a", True),
        ("tests/crash_course/test_lives.py::test_a", False),
        ("tests/trainer/training/test_resume_bitwise.py::test_resume_bitwise[lora]", True),
        ("tests/trainer/training/test_resume_bitwise.py::test_resume_bitwise[full]", False),
        ("tests/controllers/test_rented.py::test_a[memory-shown0]", True),
        ("tests/controllers/test_stories.py::test_a[postgres-shown0]", False),
        ("tests/trainer/test_a.py::test_a[memory]", False),
    ],
)
def test_slow_tests_are_distinguished_from_the_others(test: str, slow: bool) -> None:
    assert tiers.is_slow(test) == slow


@pytest.mark.parametrize("markers", ["slow", "not slow"])
@pytest.mark.parametrize(
    "test",
    [
        "tests/crash/test_lives.py::test_a",
        "tests/cli/test_demo.py::test_a",
        "tests/trainer/training/test_resume_bitwise.py::test_resume_bitwise[lora]",
        "tests/trainer/training/test_resume_bitwise.py::test_resume_bitwise[full]",
        "tests/controllers/test_rented.py::test_a[memory-shown0]",
        "tests/controllers/test_stories.py::test_a[postgres-shown0]",
        "tests/unit/broker/test_a.py::test_a",
    ],
)
def test_a_file_with_a_chosen_test_is_collected(markers: str, test: str) -> None:
    if tiers.is_slow(test) == (markers == "slow"):
        assert not tiers.has_nothing_for(markers, test.partition("::")[0])


@pytest.mark.parametrize("markers", ["", "slow or postgres"])
def test_other_choices_collect_every_file(markers: str) -> None:
    assert not tiers.has_nothing_for(markers, "tests/crash/test_lives.py")
    assert not tiers.has_nothing_for(markers, "tests/unit/test_tiers.py")


def test_files_without_a_chosen_test_are_not_imported() -> None:
    assert tiers.has_nothing_for("slow", "tests/unit/test_tiers.py")
    assert tiers.has_nothing_for("not slow", "tests/crash/test_lives.py")
    assert tiers.has_nothing_for("not slow", "tests/api/test_fuzz.py")


def test_a_sample_is_the_same_for_a_commit_and_comes_round_to_all() -> None:
    ids = [f"test_a[{number}]" for number in range(10)]
    first = tiers.drawn(ids, 3, "one commit")
    assert len(first) == 3
    assert tiers.drawn(ids[::-1], 3, "one commit") == first
    assert set().union(*(tiers.drawn(ids, 3, str(commit)) for commit in range(100))) == set(ids)


def test_a_commit_runs_some_slow_files_of_a_folder_and_every_fast_test() -> None:
    files = [entry for entry in tiers.SLOW if entry.startswith("tests/trainer/") and entry.endswith(".py")]
    slow = [f"{file}::test_{name}" for file in files for name in "ab"]
    fast = ["tests/trainer/training/test_loss.py::test_a", "tests/crash/test_lives.py::test_a"]
    run = set(slow) - tiers.unchosen_files([*slow, *fast], "one commit")
    assert not tiers.unchosen_files(fast, "one commit")
    assert len(run) == 2 * -(-len(files) // tiers.ROTATED["tests/trainer/"])
    assert all({f"{test[:-1]}a", f"{test[:-1]}b"} <= run for test in run), "a file runs whole"
    assert set().union(*(set(slow) - tiers.unchosen_files(slow, str(n)) for n in range(100))) == set(slow)


def test_a_commit_runs_some_scenarios_of_a_file_and_some_parameters() -> None:
    file, parametrised = (
        "tests/clouds/scenarios/test_rented.py",
        "test_a_fine_tune_on_each_cloud_costs_the_amount_billed",
    )
    scenarios = [f"{file}::test_{name}" for name in "abcdef"]
    parameters = [f"{file}::{parametrised}[{cloud}]" for cloud in ("aws", "lambda", "runpod", "vast")]
    run = {*scenarios, *parameters} - tiers.unchosen_parameters([*scenarios, *parameters], "one commit")
    assert len(run & set(scenarios)) == tiers.SAMPLED[file]
    assert len(run & set(parameters)) == tiers.SAMPLED[f"{file}::{parametrised}"]
