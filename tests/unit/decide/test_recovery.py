"""The next attempt goes on from the furthest checkpoint, with a plan that memory allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.decide.recovery import as_planned, furthest_first, smaller_micro_batch, step_of, workload_left
from broker.domain.offer import Plan
from tests.unit.decide import build
from trainer.contract import keys
from trainer.contract.train import DataConfig, TrainConfig

TRAIN = TrainConfig(
    model="m", data=DataConfig(path="upload:00", completion="{a}"), micro_batch=8, global_batch=24
)  # fmt: skip


def manifest(step: int, attempt: str = "a") -> str:
    return keys.checkpoint("job", attempt, step, "n0nce") + keys.MANIFEST


def test_the_furthest_step_comes_first_whatever_attempt_wrote_it() -> None:
    assert furthest_first([manifest(5, "z"), manifest(40, "a"), manifest(7, "b")]) == (
        manifest(40, "a"), manifest(7, "b"), manifest(5, "z"),
    )  # fmt: skip


@given(st.integers(0, 10**9))
def test_a_manifest_carries_its_step(step: int) -> None:
    assert step_of(manifest(step)) == step


@given(st.integers(1, 512), st.integers(1, 64), st.integers(0, 4))
def test_a_smaller_micro_batch_still_divides_the_global_batch(micro: int, times: int, changes: int) -> None:
    smaller = smaller_micro_batch(micro, micro * times, changes)
    assert 1 <= smaller <= micro
    assert micro * times % smaller == 0


def test_memory_that_ran_out_changes_the_plan_and_not_the_global_batch() -> None:
    told = as_planned(TRAIN, None, 0)
    assert (told.micro_batch, told.gradient_checkpointing) == (8, False)
    changed = as_planned(TRAIN, None, 1)
    assert (changed.micro_batch, changed.global_batch, changed.gradient_checkpointing) == (4, 24, True)


def test_machines_are_told_what_was_planned_for_them() -> None:
    plan = Plan(micro_batch=12, accumulation=2, gradient_checkpointing=True)
    told = as_planned(TRAIN, plan, 1)
    assert (told.micro_batch, told.global_batch, told.gradient_checkpointing) == (12, 24, True)


def test_only_what_is_left_is_priced() -> None:
    job = build.job()
    job = replace(job, workload=replace(job.workload, steps=100, micro_batch=4, global_batch=8))
    assert workload_left(job, ()) == job.workload
    assert workload_left(job, (manifest(60), manifest(40))).steps == 40
    assert workload_left(replace(job, oom_changes=1), ()).oom_changes == 1


@pytest.mark.parametrize("folder", ["nonsense", "-5-n", "7", "\u0663-n", "9" * 5000 + "-n", "7-n/deeper"])
def test_keys_that_no_trainer_writes_are_no_candidates(folder: str) -> None:
    stray = f"checkpoints/job/a/{folder}/manifest.json"
    assert furthest_first([stray, stray.replace("manifest", "part"), manifest(5, "z")]) == (manifest(5, "z"),)
