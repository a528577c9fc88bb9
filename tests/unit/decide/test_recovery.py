"""The next attempt goes on from the furthest checkpoint, with a plan that memory allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.decide.fit import fit
from broker.decide.hardware import TABLE
from broker.decide.memory import memory
from broker.decide.recovery import (
    LESS,
    MAX_CHANGES,
    MOST,
    furthest_first,
    given_up,
    plan_after_oom,
    planned,
    remedy,
    step_of,
    told,
    workload_left,
)
from broker.domain.job import Job
from broker.domain.offer import GIB, Drop, MemoryNeed, ModelShape, Offer, Workload
from tests.unit.decide import build
from trainer.contract import keys
from trainer.contract.train import DataConfig, TrainConfig

TRAIN = TrainConfig(
    model="m", data=DataConfig(path="upload:00", completion="{a}"), micro_batch=8, global_batch=24
)  # fmt: skip

SHAPE = ModelShape(
    name="", family="llama", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64,
    vocabulary=128_256, tied_embeddings=True, parameters=1_235_814_400, known=True,
)  # fmt: skip
WORK = Workload(
    shape=SHAPE, method="lora", lora_r=16, micro_batch=8, global_batch=24, sequence=2048, tokens_per_row=1000.0,
    steps=100,
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


PLANS = st.builds(
    lambda micro, times, checkpointing, method, sequence: replace(
        WORK, micro_batch=micro, global_batch=micro * times, gradient_checkpointing=checkpointing, method=method,
        lora_r=16 if method == "lora" else 0, sequence=sequence,
    ),
    st.integers(1, 64), st.integers(1, 16), st.booleans(), st.sampled_from(["full", "lora"]),
    st.sampled_from([128, 2048]),
)  # fmt: skip


def need(work: Workload, offer: Offer, devices: int = 1) -> MemoryNeed:
    device = TABLE[offer.accelerator]
    rows = min(work.micro_batch, -(-work.global_batch // devices))  # as the trainer divides it
    found = memory(replace(work, micro_batch=rows), bf16=device.bf16, gpu=device.gpu, devices=devices)
    assert found is not None
    return found


def train_job(work: Workload) -> Job:
    train = {"model": "m", "data": {"path": "upload:00", "completion": "{a}"}, "method": {"kind": "lora"}}
    spec = {"script": None, "train": {**train, "micro_batch": work.micro_batch, "global_batch": work.global_batch}}
    return build.job(spec_changes=spec, workload=work)


@given(PLANS, st.sampled_from(["l4", "a100-80gb-sxm"]), st.sampled_from([1, 2, 8]))
def test_each_change_keeps_the_global_batch_and_the_method_and_needs_less_memory_or_more_of_it(
    work: Workload, accelerator: str, devices: int
) -> None:
    offer = build.offer(accelerator=accelerator, gpu_memory_bytes=TABLE[accelerator].memory_bytes)
    job = train_job(work)
    for times in range(1, MAX_CHANGES + 1):
        before = planned(job)
        job = replace(job, remedy=remedy(job, offer, host=False, devices=devices))
        after = planned(job)
        assert job.remedy is not None
        assert len(job.remedy.tried) == times
        assert (after.global_batch, after.method, after.lora_r) == (work.global_batch, work.method, work.lora_r)
        assert after.global_batch % after.micro_batch == 0
        assert 1 <= after.micro_batch <= before.micro_batch
        assert after.gradient_checkpointing or not before.gradient_checkpointing
        larger = after.memory_above >= offer.gpu_memory_bytes
        less = need(after, offer, devices).required <= LESS * need(before, offer, devices).required
        assert larger or less
        train = plan_after_oom(job.spec.train, job.remedy) if job.spec.train else None
        assert train is not None
        assert (train.global_batch, train.micro_batch) == (work.global_batch, after.micro_batch)


@given(PLANS)
def test_the_plan_that_ran_out_does_not_fit_that_machine_any_more(work: Workload) -> None:
    """Wherever the estimate had let it in."""
    offer = build.offer(accelerator="l4", gpu_memory_bytes=TABLE["l4"].memory_bytes)
    if fit(work, offer).drop is not None:
        return
    changed = remedy(train_job(work), offer, host=False)
    plain = need(work, offer)
    if (plain.peak * MOST + plain.context) * (1 + plain.margin) > offer.gpu_memory_bytes:
        assert fit(replace(work, memory_scale=changed.memory_scale), offer).drop is Drop.MEMORY
    assert changed.memory_scale <= MOST


def test_the_micro_batch_goes_first_then_checkpointing_then_the_machine() -> None:
    offer = build.offer(accelerator="l4", gpu_memory_bytes=TABLE["l4"].memory_bytes)
    job = train_job(replace(WORK, micro_batch=4, global_batch=24))
    first = remedy(job, offer, host=False)
    assert (first.micro_batch, first.gradient_checkpointing, first.memory_above) == (3, False, 0)
    assert told(job, first) == (
        "memory ran out: next with micro-batch 3 instead of 4; global batch 24 as before"
    )  # fmt: skip
    single = train_job(replace(WORK, micro_batch=1, global_batch=24))
    second = remedy(single, offer, host=False)
    assert (second.micro_batch, second.gradient_checkpointing, second.memory_above) == (1, True, 0)
    assert told(single, second) == "memory ran out: next with gradient checkpointing on; global batch 24 as before"
    least = train_job(replace(WORK, micro_batch=1, global_batch=24, gradient_checkpointing=True))
    third = remedy(least, offer, host=False)
    assert third.memory_above == offer.gpu_memory_bytes
    assert "more than 22.4 GiB a device" in told(least, third)
    left = workload_left(replace(least, remedy=third), ())
    small = fit(left, offer)
    assert (small.drop, small.reason) == (Drop.MEMORY, "it ran out of 22.4 GiB before; has 22.4")
    assert fit(left, replace(offer, accelerator="l40s", gpu_memory_bytes=TABLE["l40s"].memory_bytes)).drop is None


def test_a_script_only_gets_a_larger_machine() -> None:
    job = build.job()
    changed = remedy(job, build.offer(), host=False)
    assert (changed.micro_batch, changed.memory_above) == (0, 48 * GIB)
    assert told(job, changed) == "memory ran out: next with only machines with more than 48.0 GiB a device"
    assert fit(planned(replace(job, remedy=changed)), build.offer()).drop is Drop.MEMORY
    assert plan_after_oom(TRAIN, changed) is TRAIN
    assert given_up(replace(job, remedy=changed), build.offer(), host=False) == (
        "memory ran out 2 times: l40s (48.0 GiB); l40s (48.0 GiB); ask for a larger machine"
    )


def test_a_machine_whose_own_memory_ran_out_is_followed_by_one_with_more_and_the_plan_stays() -> None:
    job = train_job(WORK)
    changed = remedy(job, build.offer(), host=True)
    assert (changed.micro_batch, changed.memory_scale, changed.ram_above) == (WORK.micro_batch, 1.0, 64 * GIB)
    assert changed.tried == ("micro-batch 8 on l40s (64.0 GiB of the machine)",)
    assert told(job, changed).startswith("memory ran out: next with only machines with more than 64.0 GiB of memory")


def test_a_task_that_nobody_estimates_changes_its_plan_all_the_same() -> None:
    job = train_job(replace(WORK, shape=None, unestimated="task dpo is not estimated"))
    changed = remedy(job, build.offer(), host=False)
    assert (changed.micro_batch, changed.memory_scale) == (6, 1.0)
    unknown = remedy(train_job(WORK), build.offer(accelerator="mystery"), host=False)
    assert (unknown.micro_batch, unknown.memory_scale) == (6, 1.0)


def test_without_a_change_the_plan_is_as_it_was_asked_for() -> None:
    assert plan_after_oom(TRAIN, None) is TRAIN


def test_only_what_is_left_is_priced() -> None:
    job = build.job()
    job = replace(job, workload=replace(job.workload, steps=100, micro_batch=4, global_batch=8))
    assert workload_left(job, ()) == job.workload
    assert workload_left(job, (manifest(60), manifest(40))).steps == 40


@pytest.mark.parametrize("folder", ["nonsense", "-5-n", "7", "\u0663-n", "9" * 5000 + "-n", "7-n/deeper"])
def test_keys_that_no_trainer_writes_are_no_candidates(folder: str) -> None:
    stray = f"checkpoints/job/a/{folder}/manifest.json"
    assert furthest_first([stray, stray.replace("manifest", "part"), manifest(5, "z")]) == (manifest(5, "z"),)
