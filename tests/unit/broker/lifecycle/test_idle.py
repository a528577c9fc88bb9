"""Traces of heartbeats: the conditions of idleness, and the signs of progress that overrule them."""

from collections.abc import Iterable
from typing import Any

import pytest

from broker.domain.job import Signal
from broker.domain.spec import IdleAction, IdleKind, IdlePolicy, idle_policy
from broker.lifecycle.idle import Idle, IdleWatch, idle_signal, judge_idle, next_watch
from trainer.contract.documents import CheckpointRef, Heartbeat

POLICY = IdlePolicy(action="drain", window_s=60, no_progress_s=120, download_s=90)
MIB = 1 << 20


def trace(samples: Iterable[tuple[float, dict[str, Any]]], policy: IdlePolicy = POLICY) -> Idle | None:
    """Return the verdict after the last sample; none before it (a trace ends where it is first judged)."""
    watched: IdleWatch | None = None
    found: Idle | None = None
    for seq, (at_s, changes) in enumerate(samples):
        assert found is None, f"judged at sample {seq}: {found}"
        values = {"attempt": "x", "boot": "b", "seq": seq, "phase": "training"}
        watched = next_watch(watched, Heartbeat(**(values | changes)), at_s, policy)
        found = judge_idle(watched, policy)
    return found


def every(step_s: float, until_s: float, **changes: Any) -> list[tuple[float, dict[str, Any]]]:
    return [(n * step_s, changes) for n in range(int(until_s / step_s) + 1)]


def test_gpus_that_do_nothing_for_the_whole_window_are_idle() -> None:
    found = trace(every(10, 60, gpu_utilisation=0.01))
    assert found is not None
    assert (found.kind, found.action) == ("gpu", "drain")
    assert "less than 5% in each of 7 samples" in found.message
    assert trace(every(10, 50, gpu_utilisation=0.01)) is None


def test_one_busy_sample_begins_the_window_again() -> None:
    busy = [*every(10, 50, gpu_utilisation=0.01), (55, {"gpu_utilisation": 0.5})]
    assert trace([*busy, *((60 + n * 10, {"gpu_utilisation": 0.01}) for n in range(6))]) is None
    assert trace([*busy, *((60 + n * 10, {"gpu_utilisation": 0.01}) for n in range(7))]) is not None


def test_few_samples_say_nothing_and_unknown_is_not_idle() -> None:
    assert trace(every(30, 60, gpu_utilisation=0.0)) is None
    assert trace(every(10, 500)) is None
    assert trace(every(10, 500, gpu_utilisation=0.0), POLICY.model_copy(update={"gpu_below": 0.0})) is None


def test_the_trainer_s_own_progress_overrules_idle_gpus() -> None:
    """A trainer whose steps are long, or whose work is done by the CPU."""
    steps = [(n * 10.0, {"gpu_utilisation": 0.0, "step": n // 4, "total_steps": 1000}) for n in range(200)]
    assert trace(steps) is None
    saves = [
        (n * 10.0, {"gpu_utilisation": 0.0, "checkpoint": CheckpointRef(manifest="m", step=n // 4)}) for n in range(200)
    ]
    assert trace(saves) is None


def test_no_step_for_long_is_no_progress_however_busy_the_gpus_are() -> None:
    stuck = every(10, 120, gpu_utilisation=1.0, step=7, total_steps=100)
    found = trace(stuck)
    assert found is not None
    assert (found.kind, found.message) == ("no_progress", "no step for 2 min, at step 7 of 100")
    assert trace(stuck[:-1]) is None
    assert trace(every(10, 500, gpu_utilisation=1.0, step=7, total_steps=100, phase="evaluating")) is None
    assert trace(every(10, 500, gpu_utilisation=1.0)) is None, "a script counts no steps"


def test_a_stalled_set_up_is_a_hung_download() -> None:
    found = trace(every(10, 90, phase="loading", network_bytes=5 * MIB, gpu_utilisation=0.0))
    assert found is not None
    assert (found.kind, found.action) == ("download", "end")
    assert "made no progress for 2 min (loading)" in found.message


@pytest.mark.parametrize(
    "moving",
    [
        lambda n: {"network_bytes": n * 2 * MIB},
        lambda n: {"message": f"shard {n // 5}"},
        lambda n: {"phase": "starting" if n % 8 < 4 else "loading"},
    ],
    ids=["receives", "says", "goes on"],
)
def test_a_set_up_that_downloads_is_not_hung(moving: Any) -> None:
    assert trace([(n * 10.0, {"phase": "loading", **moving(n)}) for n in range(100)]) is None


def test_set_up_commands_are_neither_idle_nor_part_of_a_later_idle_time() -> None:
    """The agent limits their time. The window of unused GPUs begins with the program."""
    commands = every(10, 5000, phase="setup", gpu_utilisation=0.0)
    assert trace(commands) is None
    first = (5010.0, {"phase": "training", "gpu_utilisation": 0.0})
    assert trace([*commands, first]) is None
    later = [(5010.0 + n * 10, {"phase": "training", "gpu_utilisation": 0.0}) for n in range(7)]
    found = trace([*commands, *later])
    assert found is not None
    assert found.kind == "gpu"


def test_traffic_of_the_agents_own_polls_is_no_download() -> None:
    trickle = [(n * 10.0, {"phase": "loading", "network_bytes": n * 10_000}) for n in range(10)]
    assert trace(trickle) is not None


def test_a_new_start_and_the_end_are_not_idle() -> None:
    samples = every(10, 50, gpu_utilisation=0.0)
    assert trace([*samples, (60, {"gpu_utilisation": 0.0, "boot": "other"})]) is None
    assert trace(every(10, 500, gpu_utilisation=0.0, phase="draining")) is None


def test_a_repeated_heartbeat_is_no_sample() -> None:
    beat = Heartbeat(attempt="x", boot="b", seq=1, phase="training", gpu_utilisation=0.0)
    first = next_watch(None, beat, 0, POLICY)
    assert next_watch(first, beat, 100, POLICY) is first


@pytest.mark.parametrize(
    ("kind", "action", "signal"),
    [
        ("gpu", "notify", None),
        ("gpu", "drain", Signal.IDLE),
        ("no_progress", "end", Signal.IDLE_NOW),
        ("download", "end", Signal.HUNG),
        ("download", "notify", None),
    ],
)
def test_each_idle_rule_raises_its_signal(kind: IdleKind, action: IdleAction, signal: Signal | None) -> None:
    assert idle_signal(Idle(kind=kind, action=action, message="")) is signal


def test_the_job_s_own_policy_counts_then_its_team_s() -> None:
    own, team = IdlePolicy(window_s=61), IdlePolicy(window_s=62)
    assert idle_policy(own, team) is own
    assert idle_policy(None, team) is team
    assert idle_policy(None, None) == IdlePolicy()
