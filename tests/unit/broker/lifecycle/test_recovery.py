"""The next attempt resumes from the furthest checkpoint, with a plan that memory allows."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.ids import attempt_id
from broker.domain.job import Attempt, AttemptState, Job, PlanAdjustment, Reason
from broker.domain.offer import GIB, DropReason, Offer, OfferVerdict, QuoteLine
from broker.domain.workload import MemoryNeed, ModelShape, Plan, Workload
from broker.estimator.memory.evidence import MAX_FACTOR, shortfall
from broker.estimator.planning.corrections import NO_CORRECTIONS
from broker.estimator.planning.fit import fit
from broker.estimator.planning.plan_search import Planner
from broker.estimator.speed.hardware import TABLE
from broker.lifecycle.recovery import (
    MAX_CHANGES,
    adjust_plan,
    adjusted_workload,
    adjustment_message,
    furthest_first,
    given_up_message,
    lasting_manifests,
    planned_train_config,
    workload_left,
)
from tests.support import build
from trainer.contract import object_keys as keys
from trainer.contract.data_config import DataConfig
from trainer.contract.train import TrainConfig

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


def manifest(step: int, attempt: str = "a", nonce: str = "n0nce") -> str:
    return keys.checkpoint("job", attempt, step, nonce) + keys.MANIFEST


@pytest.mark.parametrize("attempts", ["abz", "zba", "azb"])
def test_the_furthest_step_comes_first_whatever_attempt_wrote_it(attempts: str) -> None:
    five, forty, seven = (manifest(step, attempt) for step, attempt in zip((5, 40, 7), attempts, strict=True))
    assert furthest_first([five, forty, seven]) == (forty, seven, five)


@given(st.integers(0, 10**9), st.sampled_from(["n0nce", "7", "5-6", "-"]))
def test_a_manifest_carries_its_step(step: int, nonce: str) -> None:
    assert keys.step_of(manifest(step, nonce=nonce)) == step


PLANS = st.builds(
    lambda micro, times, method, sequence, free: replace(
        WORK, micro_batch=micro, global_batch=micro * times, method=method, sequence=sequence,
        lora_r=16 if method == "lora" else 0, free_micro_batch=free, free_checkpointing=free,
    ),
    st.integers(1, 32), st.integers(1, 16), st.sampled_from(["full", "lora"]), st.sampled_from([128, 2048]),
    st.booleans(),
)  # fmt: skip


def offer_of(accelerator: str, gpus: int = 1) -> Offer:
    return build.offer(accelerator=accelerator, gpu_memory_bytes=TABLE[accelerator].memory_bytes, gpus=gpus)


def line_of(offer: Offer, plan: Plan | None = None) -> QuoteLine:
    return QuoteLine(offer=offer, verdict=OfferVerdict.KEPT, reason="fits", plan=plan)


def need(work: Workload, plan: Plan, offer: Offer) -> MemoryNeed:
    return Planner(work).need(plan, TABLE[offer.accelerator])


def train_job(work: Workload) -> Job:
    train = {"model": "m", "data": {"path": "upload:00", "completion": "{a}"}, "method": {"kind": "lora"}}
    spec = {"script": None, "train": {**train, "micro_batch": work.micro_batch, "global_batch": work.global_batch}}
    return build.job(spec_changes=spec, workload=work)


@given(PLANS, st.sampled_from(["l4", "a100-80gb-sxm"]), st.sampled_from([1, 2, 8]))
@settings(max_examples=40, deadline=None)
def test_each_plan_change_keeps_batch_and_method_and_lowers_memory(work: Workload, accelerator: str, gpus: int) -> None:
    """Each change keeps the global batch and the method and needs less memory or more of it."""
    offer, job = offer_of(accelerator, gpus), train_job(work)
    for times in range(1, MAX_CHANGES + 1):
        ran = fit(adjusted_workload(job), offer)
        if ran.plan is None:
            assert ran.drop is DropReason.MEMORY
            return
        job = replace(job, remedy=adjust_plan(job, line_of(offer, ran.plan), host=False))
        after = adjusted_workload(job)
        assert job.remedy is not None
        assert len(job.remedy.failed_plans) == times
        assert (after.global_batch, after.method, after.lora_r) == (work.global_batch, work.method, work.lora_r)
        again = fit(after, offer)
        if again.plan is None:
            assert again.drop is DropReason.MEMORY  # a larger machine, or nothing
            continue
        assert need(after, again.plan, offer).peak < need(after, ran.plan, offer).peak
        assert again.plan.micro_batch * again.plan.accumulation * again.plan.devices == work.global_batch
        assert job.spec.train is not None
        told_ = planned_train_config(job.spec.train, again.plan, job.remedy)
        assert (told_.global_batch, told_.micro_batch) == (work.global_batch, again.plan.micro_batch)


@given(PLANS)
@settings(max_examples=40, deadline=None)
def test_the_plan_that_ran_out_does_not_fit_that_machine_any_more(work: Workload) -> None:
    """This holds on every machine that the estimate had allowed, unless its error would be implausibly large."""
    offer = offer_of("l4")
    ran = fit(work, offer)
    if ran.plan is None:
        return
    changed = adjust_plan(train_job(work), line_of(offer, ran.plan), host=False)
    assert changed.memory_factor <= MAX_FACTOR
    plain = need(work, ran.plan, offer)
    if (plain.peak * MAX_FACTOR + plain.context) * (1 + plain.margin) > offer.gpu_memory_bytes:
        corrected = NO_CORRECTIONS.need(replace(work, memory_factor=changed.memory_factor), plain, True, False)
        assert corrected.required > offer.gpu_memory_bytes


def test_the_micro_batch_goes_first_then_checkpointing_then_the_machine() -> None:
    offer = offer_of("l4")
    job = train_job(replace(WORK, micro_batch=4))
    ran = line_of(offer, Plan(micro_batch=4, accumulation=6))
    first = adjust_plan(job, ran, host=False)
    assert (first.micro_batch, first.gradient_checkpointing, first.oom_device_bytes) == (3, False, 0)
    assert first.failed_plans == ("micro-batch 4 on l4 (22.4 GiB)",)
    assert adjustment_message(job, ran, first) == (
        "memory ran out: next with micro-batch 3 instead of 4; global batch 24 as before"
    )  # fmt: skip
    single = train_job(replace(WORK, micro_batch=1))
    ran = line_of(offer, Plan(micro_batch=1, accumulation=24))
    second = adjust_plan(single, ran, host=False)
    assert (second.micro_batch, second.gradient_checkpointing, second.oom_device_bytes) == (1, True, 0)
    assert (
        adjustment_message(single, ran, second)
        == "memory ran out: next with gradient checkpointing on; global batch 24 as before"
    )
    ran = line_of(offer, Plan(micro_batch=1, accumulation=24, gradient_checkpointing=True))
    least = train_job(replace(WORK, micro_batch=1, gradient_checkpointing=True))
    third = adjust_plan(least, ran, host=False)
    assert third.oom_device_bytes == offer.gpu_memory_bytes
    assert "more than 22.4 GiB a device" in adjustment_message(least, ran, third)
    assert third.failed_plans == ("micro-batch 1 with checkpointing on l4 (22.4 GiB)",)
    left = workload_left(replace(least, remedy=third), ())
    small = fit(left, offer)
    assert (small.drop, small.reason) == (DropReason.MEMORY, "ran out of 22.4 GiB before; this has 22.4")
    assert fit(left, offer_of("l40s")).drop is None


def test_a_script_only_gets_a_larger_machine() -> None:
    job, ran = build.job(), build.line()
    changed = adjust_plan(job, ran, host=False)
    assert (changed.micro_batch, changed.oom_device_bytes) == (0, 48 * GIB)
    assert (
        adjustment_message(job, ran, changed)
        == "memory ran out: next with only machines with more than 48.0 GiB a device"
    )
    assert fit(adjusted_workload(replace(job, remedy=changed)), build.offer()).drop is DropReason.MEMORY
    assert given_up_message(replace(job, remedy=changed), ran, host=False) == (
        "memory ran out 2 times: l40s (48.0 GiB); l40s (48.0 GiB); ask for a larger machine"
    )


def test_host_memory_exhaustion_asks_for_more_host_memory_only() -> None:
    """The plan stays the same."""
    job, ran = train_job(WORK), line_of(build.offer(), Plan(micro_batch=8, accumulation=3))
    changed = adjust_plan(job, ran, host=True)
    assert (changed.micro_batch, changed.memory_factor, changed.oom_host_bytes) == (0, 1.0, 64 * GIB)
    assert changed.failed_plans == ("micro-batch 8 on l40s (64.0 GiB of the machine)",)
    assert adjustment_message(job, ran, changed).startswith(
        "memory ran out: next with only machines with more than 64.0 GiB of mem"
    )
    assert adjusted_workload(replace(job, remedy=changed)).micro_batch == WORK.micro_batch


def test_a_task_without_an_estimate_changes_its_plan_too() -> None:
    job = train_job(replace(WORK, shape=None, unestimated="task dpo is not estimated"))
    first = adjust_plan(job, build.line(), host=False)
    assert (first.micro_batch, first.gradient_checkpointing, first.memory_factor) == (6, False, 1.0)
    assert job.spec.train is not None
    changed = planned_train_config(job.spec.train, None, first)
    assert (changed.micro_batch, changed.global_batch, changed.gradient_checkpointing) == (6, 24, False)
    single = train_job(replace(WORK, shape=None, micro_batch=1))
    second = adjust_plan(single, build.line(), host=False)
    assert single.spec.train is not None
    assert planned_train_config(single.spec.train, None, second).gradient_checkpointing is True
    unknown = adjust_plan(train_job(WORK), build.line(accelerator="mystery"), host=False)
    assert (unknown.micro_batch, unknown.memory_factor) == (6, 1.0)


def test_machines_receive_the_plan_that_was_made_for_them() -> None:
    told_ = planned_train_config(TRAIN, None, None)
    assert (told_.micro_batch, told_.gradient_checkpointing) == (8, False)
    plan = Plan(micro_batch=12, accumulation=2, gradient_checkpointing=True)
    told_ = planned_train_config(TRAIN, plan, PlanAdjustment(failed_plans=("once",), micro_batch=12))
    assert (told_.micro_batch, told_.global_batch, told_.gradient_checkpointing) == (12, 24, True)


def test_only_what_is_left_is_priced() -> None:
    job = build.job()
    job = replace(job, workload=replace(job.workload, steps=100, micro_batch=4, global_batch=8))
    assert workload_left(job, ()) == job.workload
    assert workload_left(job, (manifest(60), manifest(40))).steps == 40


@pytest.mark.parametrize("folder", ["nonsense", "-5-n", "7", "\u0663-n", "9" * 5000 + "-n", "7-n/deeper"])
def test_keys_that_no_trainer_writes_are_no_candidates(folder: str) -> None:
    stray = f"checkpoints/job/a/{folder}/manifest.json"
    assert furthest_first([stray, stray.replace("manifest", "part"), manifest(5, "z")]) == (manifest(5, "z"),)


@pytest.mark.parametrize(("times", "expected"), [(0.5, 1.0), (1.5, 1.5), (2.2, 2.2), (9.0, MAX_FACTOR)])
def test_an_estimate_is_corrected_to_a_tenth_more_than_there_was(times: float, expected: float) -> None:
    plain = need(WORK, Plan(micro_batch=8), offer_of("l4"))
    device_bytes = int((plain.peak * times + plain.context) * (1 + plain.margin) / 1.1)
    assert shortfall(device_bytes, plain) == pytest.approx(expected)


def test_the_last_smaller_plan_has_one_row() -> None:
    job = train_job(replace(WORK, shape=None, micro_batch=2))
    assert adjust_plan(job, build.line(), host=False).micro_batch == 1


@pytest.mark.parametrize("sequence", [128, 512, 2048])
def test_changed_plan_needs_clearly_less_or_a_larger_machine(sequence: int) -> None:
    offer, work = offer_of("l4"), replace(WORK, sequence=sequence)
    ran = Plan(micro_batch=8, accumulation=3)
    changed = adjust_plan(train_job(work), line_of(offer, ran), host=False)
    after = replace(ran, micro_batch=changed.micro_batch or 8, gradient_checkpointing=changed.gradient_checkpointing)
    less = need(work, after, offer).required <= 0.8 * need(work, ran, offer).required
    assert less or changed.oom_device_bytes


@pytest.mark.parametrize("way", ["fsdp", "hybrid"])
def test_multi_gpu_exhaustion_is_compared_with_one_gpus_need(way: Literal["fsdp", "hybrid"]) -> None:
    """The comparison corrects the estimate. Without it the same machines are bought again."""
    work, offer = replace(WORK, method="full", lora_r=0), offer_of("l4", gpus=8)
    plan = Plan(parallelism=way, devices=16, micro_batch=1)
    line = replace(line_of(offer, plan), nodes=2)
    changed = adjust_plan(train_job(work), line, host=False)
    one = Planner(work).need(plan, TABLE["l4"], nodes=2)
    assert changed.memory_factor == shortfall(offer.gpu_memory_bytes, one) > 1


def test_plan_that_already_recomputes_is_not_changed_to_that() -> None:
    free = train_job(replace(WORK, micro_batch=4, free_checkpointing=True))
    ran = line_of(offer_of("l4"), Plan(micro_batch=4, accumulation=6, gradient_checkpointing=True))
    changed = adjust_plan(free, ran, host=False)
    assert changed.failed_plans == ("micro-batch 4 with checkpointing on l4 (22.4 GiB)",)
    assert "gradient checkpointing on" not in adjustment_message(free, ran, changed)


def test_micro_batch_and_checkpointing_change_together_if_needed() -> None:
    work = replace(WORK, method="full", lora_r=0, global_batch=32, sequence=256)
    job, ran = train_job(work), line_of(offer_of("l4"), Plan(micro_batch=8, accumulation=4))
    changed = adjust_plan(job, ran, host=False)
    assert (changed.micro_batch, changed.gradient_checkpointing) == (4, True)
    assert adjustment_message(job, ran, changed) == (
        "memory ran out: next with micro-batch 4 instead of 8, gradient checkpointing on; global batch 32 as before"
    )


@pytest.mark.parametrize("recomputes", [False, True])
def test_checkpointing_stays_free_to_plan_after_memory_ran_out(recomputes: bool) -> None:
    free = train_job(replace(WORK, free_checkpointing=True))
    changed = PlanAdjustment(failed_plans=("once",), micro_batch=4, gradient_checkpointing=recomputes)
    assert adjusted_workload(replace(free, remedy=changed)).free_checkpointing is not recomputes


def test_a_model_too_large_for_one_gpu_is_sharded_after_memory_ran_out() -> None:
    """The model is divided between more GPUs. Larger GPUs alone do not help, because none exceeds the largest."""
    work = replace(WORK, method="full", lora_r=0, micro_batch=1, global_batch=8)
    h200 = offer_of("h200-sxm")
    job = train_job(work)
    alone = line_of(h200, Plan(micro_batch=1, accumulation=8, gradient_checkpointing=True))
    changed = adjust_plan(job, alone, host=False)
    assert (changed.oom_device_bytes, changed.oom_shards) == (h200.gpu_memory_bytes, 1)
    assert adjustment_message(job, alone, changed).endswith(
        "a device, or the model divided between more than 1 devices; global batch 8 as before"
    )
    left = adjusted_workload(replace(job, remedy=changed))
    assert fit(left, h200).drop is DropReason.MEMORY
    two = fit(left, offer_of("h200-sxm", gpus=2))
    assert two.plan is not None
    assert (two.drop, two.plan.parallelism) == (None, "fsdp")
    again = adjust_plan(replace(job, remedy=changed), line_of(offer_of("h200-sxm", gpus=2), two.plan), host=False)
    assert again.oom_shards in (1, 2)
    after = adjusted_workload(replace(job, remedy=replace(again, oom_device_bytes=h200.gpu_memory_bytes, oom_shards=2)))
    assert fit(after, offer_of("h200-sxm", gpus=2)).reason.startswith("ran out of ")
    assert fit(after, offer_of("h200-sxm", gpus=8)).drop is None
    lora = adjusted_workload(replace(train_job(replace(WORK, method="qlora")), remedy=changed))
    assert fit(lora, offer_of("h200-sxm", gpus=8)).reason.startswith("ran out of "), "four bits are not divided"


def test_the_next_quote_excludes_the_failed_plan() -> None:
    """The next quote has the limits of the failed machine. Without them the machine whose memory ran out is bought
    again.
    """
    changed = PlanAdjustment(
        failed_plans=("once",), memory_factor=1.5, oom_device_bytes=24 * GIB, oom_host_bytes=64 * GIB
    )
    left = adjusted_workload(replace(train_job(WORK), remedy=changed))
    assert (left.memory_factor, left.oom_device_bytes, left.oom_host_bytes) == (1.5, 24 * GIB, 64 * GIB)


def test_given_up_job_names_the_memory_and_the_fix() -> None:
    """The message of a job that is given up names the exhausted memory and the change to make."""
    job, ran = train_job(WORK), line_of(build.offer(), Plan(micro_batch=8, accumulation=3))
    assert given_up_message(job, ran, host=True) == (
        "memory ran out once: micro-batch 8 on l40s (64.0 GiB of the machine); "
        "ask for a shorter max_length, method lora, or larger GPUs"
    )


def test_a_job_on_several_machines_starts_from_a_checkpoint_that_stays() -> None:
    """A live attempt deletes its older checkpoints, and each machine reads the store at another time."""
    ended = build.attempt(AttemptState.ENDED, id=attempt_id(build.JOB_ID, 1), number=1, reason=Reason.PREEMPTED)
    live = build.attempt(AttemptState.TRAINING, id=attempt_id(build.JOB_ID, 2), number=2)

    def manifest(step: int, of: Attempt) -> str:
        return keys.checkpoint(build.JOB_ID, of.id, step, "n") + keys.MANIFEST

    found = (manifest(30, live), manifest(20, ended), manifest(10, ended))
    assert lasting_manifests(found, (ended, live)) == found[1:]
    assert lasting_manifests(found, (ended, replace(live, state=AttemptState.ENDED))) == found
    assert lasting_manifests(found[:1], (live,)) == found[:1], "there is no other"
