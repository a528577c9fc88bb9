"""Host memory (RAM) that a plan needs."""

from dataclasses import replace
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from broker.domain.offer import GIB, DropReason
from broker.domain.workload import Parallelism, Plan
from broker.estimator.memory.host_memory import AGENT, PROCESS, host_bytes
from tests.support.machines import LLAMA_3_8B, WORK, offer, quoted

FULL = replace(WORK, method="full", lora_r=0)
P = LLAMA_3_8B.parameters
STATES = 12 * P


def plan(way: Parallelism, devices: int) -> Plan:
    return Plan(parallelism=way, devices=devices, micro_batch=1)


def test_host_memory_of_a_full_fine_tune_counts_weights_per_process() -> None:
    assert host_bytes(FULL, plan("single", 1), states=STATES) == PROCESS + AGENT + STATES
    four = host_bytes(FULL, plan("ddp", 4), states=STATES)
    assert four == 4 * PROCESS + AGENT + 4 * 4 * P, "each process reads all of it"
    divided = host_bytes(FULL, plan("fsdp", 4), states=STATES)
    assert divided == 4 * PROCESS + AGENT + STATES, "the first one alone reads it"
    assert host_bytes(FULL, plan("fsdp", 8), states=STATES, nodes=2) == 4 * PROCESS + AGENT + STATES // 2
    assert host_bytes(FULL, plan("hybrid", 8), states=STATES, nodes=2) == 4 * PROCESS + AGENT + STATES
    far = host_bytes(FULL, plan("fsdp", 64), states=STATES, nodes=8)
    assert far == 8 * PROCESS + AGENT + 4 * P, "the result is whole in the first process"
    best = replace(FULL, keeps_best=True)
    assert host_bytes(best, plan("single", 1), states=STATES) == PROCESS + AGENT + STATES + 2 * 4 * P, "and their copy"


def test_frozen_base_is_mapped_and_a_merged_base_is_not() -> None:
    small = 12 * 10**6
    assert host_bytes(WORK, plan("ddp", 2), states=small) == 2 * PROCESS + AGENT + small
    cast = replace(WORK, precision="fp32")
    assert host_bytes(cast, plan("ddp", 2), states=small) == 2 * PROCESS + AGENT + 2 * 4 * P
    assert host_bytes(cast, plan("fsdp", 2), states=small) == 2 * PROCESS + AGENT + 4 * P
    merged = replace(WORK, merges=True)
    assert host_bytes(merged, plan("ddp", 2), states=small) == 2 * PROCESS + AGENT + 2 * P


@given(
    st.sampled_from(["full", "lora"]), st.sampled_from(["ddp", "fsdp"]), st.integers(1, 8), st.integers(1, 4),
    st.booleans(), st.booleans(), st.integers(0, 10**12),
)  # fmt: skip
def test_host_memory_is_monotone_in_machines_and_options(
    method: Literal["full", "lora"], way: Parallelism, each: int, nodes: int, best: bool, merged: bool, states: int
) -> None:
    work = replace(WORK, method=method, keeps_best=best, merges=merged)
    one = host_bytes(work, plan(way, each), states=states)
    assert host_bytes(work, plan(way, each * nodes), states=states, nodes=nodes) <= one
    assert host_bytes(replace(work, keeps_best=True, merges=True), plan(way, each), states=states) >= one


def test_a_machine_with_too_little_for_the_checkpoint_s_copy_is_not_bought() -> None:
    market = [offer(gpus=8, vcpus=64, ram_bytes=size * GIB) for size in (100, 2000)]
    small, large = sorted(quoted(market, work=FULL).lines, key=lambda line: line.offer.ram_bytes)
    assert (large.drop, large.plan and large.plan.parallelism) == (None, "fsdp")
    assert small.drop is DropReason.HOST
    assert small.reason == "100 GiB of RAM; 114 for processes, the weights they read and a copy of a checkpoint"
