"""Plan for a machine: the fastest plan that fits, at the user's global batch."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.domain.offer import GIB, DropReason, HostFacts
from broker.domain.workload import Plan, Workload
from broker.estimator.memory.job_memory import may_shard
from broker.estimator.planning.fit import fit
from broker.estimator.planning.plan_search import (
    SPEED_TIE_RATIO,
    Planned,
    Planner,
    devices_of,
    dividers,
    parallelism_candidates,
)
from broker.estimator.speed.hardware import TABLE, Hardware
from broker.estimator.speed.throughput import step_seconds
from tests.support.machines import LLAMA_3_8B, SCRIPT, SMOLLM2_135M, WORK, offer

FREE = replace(
    WORK, free_micro_batch=True, free_checkpointing=True, gradient_checkpointing=False, global_batch=64
)  # fmt: skip
BIG = [h for h in TABLE.values() if h.gpu and h.memory_bytes > 30 * GIB]


def best(work: Workload, name: str = "h100-sxm", there: int = 1, **more: Any) -> Planned:
    hardware = TABLE[name]
    has = more.pop("has", hardware.memory_bytes)
    return Planner(work).best(hardware, has, there, computing=hardware, **more)


def test_a_given_plan_is_kept() -> None:
    found = best(replace(WORK, micro_batch=2, gradient_checkpointing=True, global_batch=8), there=2)
    assert found.plan == Plan(
        parallelism="ddp", devices=2, micro_batch=2, accumulation=2, gradient_checkpointing=True
    )  # fmt: skip


def test_activations_are_kept_where_they_fit_and_recomputed_otherwise() -> None:
    large, small = best(FREE, "h200-sxm"), best(FREE, "l40s", has=30 * GIB)
    assert (large.plan.gradient_checkpointing, large.fits) == (False, True)
    assert (small.plan.gradient_checkpointing, small.fits) == (True, True)


def test_a_model_that_fits_nowhere_states_its_least_need() -> None:
    found = best(replace(FREE, method="full"), "l4")
    assert not found.fits
    assert (found.plan.micro_batch, found.plan.gradient_checkpointing) == (1, True)
    assert found.memory.required > TABLE["l4"].memory_bytes


WHOLE = replace(FREE, method="full", global_batch=8, sequence=256)
"""Taken whole it accumulates no gradients, and needs less memory than row by row."""


def test_the_whole_batch_at_once_is_taken_where_only_that_fits() -> None:
    h200 = TABLE["h200-sxm"]
    by_row = Planner(WHOLE).need(Plan(micro_batch=1, accumulation=8, gradient_checkpointing=True), h200)
    assert by_row.required > h200.memory_bytes
    found = best(WHOLE, "h200-sxm")
    assert (found.fits, found.plan.micro_batch, found.plan.accumulation) == (True, 8, 1)
    assert found.memory.required <= h200.memory_bytes
    assert best(WHOLE, "l4").memory.required < by_row.required  # the least, where nothing fits


def test_a_model_is_divided_only_where_no_gpu_holds_all_of_it() -> None:
    full = replace(FREE, method="full")
    assert not best(full).fits
    found = best(full, there=8)
    assert (found.fits, found.plan.parallelism) == (True, "fsdp")
    assert found.memory.margin >= 0.1
    small = best(replace(full, shape=SMOLLM2_135M), there=8)
    assert (small.fits, small.plan.parallelism) == (True, "ddp")
    assert parallelism_candidates(1, 1, divided=True) == [["single"]]
    assert parallelism_candidates(8, 1, divided=True) == [["ddp"], ["fsdp"]]
    assert parallelism_candidates(16, 2, divided=True) == [["ddp"], ["fsdp", "hybrid"]]
    assert parallelism_candidates(16, 2, divided=False) == [["ddp"]]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "qlora"}, {"method": "lora8"}, {"method": "full", "optimizer": "adafactor"},
        {"method": "full", "optimizer": "adamw_8bit"}, {"method": "full", "precision": "fp16"},
        {"method": "full", "task": "reward_model"}, {"method": "full", "shape": replace(LLAMA_3_8B, head="text")},
    ],
)  # fmt: skip
def test_an_unshardable_model_is_replicated_on_every_gpu(changes: dict[str, Any]) -> None:
    found = best(replace(FREE, **changes), there=8, has=12 * GIB)
    assert found.plan.parallelism == "ddp"
    assert may_shard(replace(FREE, method="full"))


def test_a_model_is_divided_within_machines_where_their_network_is_slow() -> None:
    slow = replace(TABLE["h100-sxm"], network=1e9)
    full = replace(FREE, method="full", free_micro_batch=False, micro_batch=1)
    found = Planner(full).best(slow, 80 * GIB, 16, computing=slow, nodes=2)
    assert (found.plan.parallelism, found.plan.devices) == ("hybrid", 16)
    assert parallelism_candidates(2, 2, divided=True) == [["ddp"], ["fsdp"]]


def test_a_cpu_gets_no_more_rows_than_the_trainer_would_take() -> None:
    small = replace(FREE, shape=SMOLLM2_135M, micro_batch=4)
    emulated = fit(small, offer(emulated_on="cpu", emulated_vcpus=2)).plan
    real = fit(small, offer()).plan
    assert emulated is not None
    assert real is not None
    assert emulated.micro_batch <= 4 < real.micro_batch


def test_the_link_that_the_cloud_names_is_the_one_that_counts() -> None:
    full = replace(FREE, shape=SMOLLM2_135M, method="full", global_batch=8, free_micro_batch=False, micro_batch=1)
    said = [fit(full, offer(gpus=8, facts=HostFacts(interconnect=link))).pace for link in ("nvlink", "pcie", None)]
    nvlink, pcie, unsaid = (pace.step_s for pace in said if pace is not None)
    assert nvlink == unsaid < pcie


def test_after_memory_ran_out_no_plan_has_more_rows_than_are_allowed() -> None:
    first, again = best(FREE, "h200-sxm"), best(replace(FREE, max_micro_batch=2), "h200-sxm")
    assert first.plan.micro_batch > again.plan.micro_batch
    assert again.plan.micro_batch <= 2
    assert again.plan.micro_batch * again.plan.accumulation == FREE.global_batch


def test_a_workload_without_a_shape_has_no_plan() -> None:
    with pytest.raises(ValueError, match="cannot be planned"):
        Planner(SCRIPT)
    assert fit(SCRIPT, offer()).plan is None


@pytest.mark.parametrize(
    ("micro", "total", "gpus", "devices"),
    [(4, 32, 8, 8), (4, 32, 3, 2), (4, 12, 8, 3), (8, 8, 8, 1), (1, 7, 4, 1), (1, 8, 0, 1)],
)
def test_devices_share_the_micro_batches_evenly(micro: int, total: int, gpus: int, devices: int) -> None:
    assert devices_of(replace(WORK, micro_batch=micro, global_batch=total), gpus) == devices


def test_micro_batches_are_spread_evenly_over_machines_where_possible() -> None:
    nine = replace(WORK, micro_batch=1, global_batch=9)
    assert (devices_of(nine, 16), devices_of(nine, 16, 2)) == (9, 9)
    twelve = replace(WORK, micro_batch=1, global_batch=18)
    assert (devices_of(twelve, 16), devices_of(twelve, 16, 2), devices_of(twelve, 12, 4)) == (9, 6, 9)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_divisors_divide_and_are_spaced(rows: int, most: int) -> None:
    found = dividers(rows, most)
    assert found[0] == 1
    assert all(rows % d == 0 and d <= most for d in found)
    assert all(b >= 1.5 * a for a, b in pairwise(found))


works = st.builds(
    replace,
    st.just(FREE),
    shape=st.sampled_from([LLAMA_3_8B, SMOLLM2_135M]),
    method=st.sampled_from(["full", "lora"]),
    global_batch=st.sampled_from([1, 6, 8, 48, 64]),
    sequence=st.sampled_from([256, 2048]),
    tokens_per_row=st.floats(20, 256),
    free_checkpointing=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(works, st.sampled_from(BIG), st.sampled_from([1, 2, 5, 8]))
@example(WHOLE, TABLE["h200-sxm"], 1)
def test_no_plan_of_its_kind_that_fits_is_faster_than_the_one_taken(work: Workload, gpu: Hardware, there: int) -> None:
    planner = Planner(work)
    found = planner.best(gpu, gpu.memory_bytes, there, computing=gpu)
    plan = found.plan
    assert plan.micro_batch * plan.accumulation * plan.devices == work.global_batch
    assert found.fits == (found.memory.required <= gpu.memory_bytes)
    for rows in dividers(work.global_batch // plan.devices, 64):
        for again in (False, True) if work.free_checkpointing else (work.gradient_checkpointing,):
            other = replace(
                plan, micro_batch=rows, accumulation=work.global_batch // plan.devices // rows,
                gradient_checkpointing=again,
            )  # fmt: skip
            if planner.need(other, gpu).required <= gpu.memory_bytes:
                assert found.fits
                assert found.step_s <= step_seconds(planner.run(other, gpu), gpu) * SPEED_TIE_RATIO


@settings(max_examples=30, deadline=None)
@given(works, st.sampled_from(BIG), st.sampled_from(["ddp", "fsdp"]), st.integers(1, 5))
def test_more_shards_and_fewer_rows_never_need_more(
    work: Workload, gpu: Hardware, way: Literal["ddp", "fsdp"], times: int
) -> None:
    planner = Planner(work)
    plan = Plan(parallelism=way, devices=2, micro_batch=2)
    need = planner.need(plan, gpu).required
    assert planner.need(replace(plan, micro_batch=1), gpu).required <= need
    assert planner.need(replace(plan, devices=2 * 2**times), gpu).required <= need


def test_too_little_memory_for_any_plan_is_a_reason() -> None:
    found = fit(FREE, offer(accelerator="l4", gpu_memory_bytes=8 * GIB))
    assert found.drop is DropReason.MEMORY
    assert "has 8.0" in found.reason
