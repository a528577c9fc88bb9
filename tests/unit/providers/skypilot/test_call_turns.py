"""Turns of calls: processes that share an account keep the cloud's rate together."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from providers.skypilot.plugin.call_turns import MAX_AHEAD_S, CallSlots, CallTurns


def slots(end: object, *, boot: str = "boot", paused_until: float = 0.0) -> str:
    """Return the content of a file with one slot."""
    return json.dumps({"boot": boot, "ends": [end], "paused_until": paused_until})


class Time:
    """Monotonic clock that only sleeps move."""

    def __init__(self, now: float = 1000.0, jitter: float = 0.0) -> None:
        self.now, self.jitter = now, jitter

    def turns(self, path: Path, interval_s: float = 2.0, **changes: Any) -> CallTurns:
        return CallTurns(path, interval_s, lambda: self.now, self.sleep, lambda: self.jitter, **changes)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_calls_of_several_processes_are_an_interval_apart(tmp_path: Path) -> None:
    """Each process has a client of its own; all of them call at the same time."""
    begun = []
    for _ in range(6):
        time = Time()
        time.turns(tmp_path / "page").wait()
        begun.append(time.now)
    assert begun == [1000.0 + 2.0 * n for n in range(6)]


def test_processes_that_run_at_once_get_different_slots(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from providers.skypilot.plugin.call_turns import CallTurns\n"
        "slots = []\n"
        "turns = CallTurns(pathlib.Path(sys.argv[1]), 1.0, lambda: 1000.0, slots.append, lambda: 0.0)\n"
        "for _ in range(20): turns.wait()\n"
        "print(*[1000.0 + wait for wait in slots], *[1000.0] * (20 - len(slots)))\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "page")], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    slots = sorted(float(slot) for process in running for slot in process.communicate(timeout=60)[0].split())
    assert slots == [1000.0 + n for n in range(80)]


def test_first_call_and_a_call_after_a_rest_wait_for_nothing(tmp_path: Path) -> None:
    time = Time()
    turns = time.turns(tmp_path / "new" / "page")
    turns.wait()
    assert time.now == 1000.0
    time.now += 60
    turns.wait()
    assert time.now == 1060.0


def test_no_call_begins_within_the_penalty_of_a_refusal(tmp_path: Path) -> None:
    time = Time()
    turns = time.turns(tmp_path / "create", 4.5)
    turns.wait()
    turns.postpone(12.0)
    turns.wait()
    assert time.now == 1012.0


def test_refusal_behind_which_others_wait_takes_none_of_their_slots(tmp_path: Path) -> None:
    time, other = Time(), Time()
    turns = time.turns(tmp_path / "page")
    turns.wait()
    for _ in range(3):
        other.turns(tmp_path / "page").wait()
    turns.postpone(1.0)
    turns.wait()
    assert (other.now, time.now) == (1006.0, 1008.0)


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.6, 0.9])
def test_program_with_a_rhythm_of_its_own_refuses_few_calls(tmp_path: Path, phase: float) -> None:
    """The daemon lists every 2 s and Vast accepts one listing a second: no phase between the two lasts."""
    time, shares = Time(), random.Random(0)
    turns = CallTurns(tmp_path / "page", 2.0, lambda: time.now, time.sleep, shares.random)
    in_a_row = []
    for _ in range(200):
        refused = 0
        turns.wait()
        while (time.now - phase) % 2.0 < 1.0:
            refused += 1
            turns.postpone(1.0)
            turns.wait()
        in_a_row.append(refused)
    assert max(in_a_row) <= 4


def test_a_burst_of_any_size_keeps_the_interval(tmp_path: Path) -> None:
    """The last of 500 creates waits 37 minutes."""
    begun = []
    for _ in range(500):
        time = Time()
        time.turns(tmp_path / "create", 4.5).wait()
        begun.append(time.now)
    assert begun == [1000.0 + 4.5 * n for n in range(500)]


@pytest.mark.parametrize(("boot", "begin"), [("first", 1002.0), ("second", 1000.0), (None, 1000.0)])
def test_slots_of_another_boot_are_ignored(tmp_path: Path, boot: str | None, begin: float) -> None:
    first, later = tmp_path / "first", tmp_path / "later"
    first.write_text("first\n")
    if boot is not None:
        later.write_text(f"{boot}\n")
    time = Time()
    CallTurns(tmp_path / "page", 2.0, lambda: 1000.0, time.sleep, lambda: 0.0, first).wait()
    CallTurns(tmp_path / "page", 2.0, lambda: time.now, time.sleep, lambda: 0.0, later).wait()
    assert time.now == begin


def test_calls_without_a_boot_id_take_turns(tmp_path: Path) -> None:
    time = Time()
    turns = CallTurns(tmp_path / "page", 2.0, lambda: time.now, time.sleep, lambda: 0.0, tmp_path / "absent")
    for _ in range(3):
        turns.wait()
    assert time.now == 1004.0


@pytest.mark.parametrize(
    "content",
    [
        "", "no JSON", "1100", "[]", "{}", '{"boot": "boot"}', slots(float("nan")), slots(float("inf")), slots("soon"),
        slots(1000 + MAX_AHEAD_S + 1), slots(1000, paused_until=1000 + MAX_AHEAD_S + 1), slots(2000, boot="another"),
        slots(None), slots(10**400),
    ],
)  # fmt: skip
def test_slots_that_cannot_be_true_are_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "page").write_text(content)
    (tmp_path / "boot").write_text("boot")
    time = Time()
    turns = CallTurns(tmp_path / "page", 2.0, lambda: time.now, time.sleep, lambda: 0.0, tmp_path / "boot")
    begun = []
    for _ in range(3):
        turns.wait()
        begun.append(time.now)
    assert [later - earlier for earlier, later in pairwise([1000.0, *begun])] == [0.0, 2.0, 2.0]


def test_process_without_a_writable_folder_keeps_the_rate_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    time = Time()
    turns = time.turns(tmp_path / "file" / "page")
    turns.wait()
    assert time.now == 1000.0
    turns.postpone(12.0)
    turns.wait()
    assert time.now == 1012.0


def test_ten_calls_a_minute_may_begin_at_once(tmp_path: Path) -> None:
    begun = []
    for _ in range(25):
        time = Time()
        time.turns(tmp_path / "search", 60.0, calls=10).wait()
        begun.append(time.now)
    assert begun == [1000.0] * 10 + [1060.0] * 10 + [1120.0] * 5


def test_a_process_behind_a_long_queue_takes_no_slot_yet(tmp_path: Path) -> None:
    """The daemon, which refuses long waits, takes the slot before the process tries again."""
    time, daemon = Time(), Time()
    turns = time.turns(tmp_path / "page", longest_queue_s=3.0)
    for _ in range(2):
        Time().turns(tmp_path / "page").wait()
    slots_of_daemon = CallSlots(tmp_path / "page", 1, lambda: daemon.now)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        if not waits:
            waits.append(slots_of_daemon.take(2.0, longest_wait_s=4.0).wait_s)
        time.now += seconds

    CallTurns(tmp_path / "page", 2.0, lambda: time.now, sleep, lambda: 0.0, longest_queue_s=3.0).wait()
    assert (waits, time.now) == ([4.0], 1006.0)
    assert slots_of_daemon.take(2.0, longest_wait_s=4.0).end is None
    turns.wait()
    assert time.now == 1008.0
