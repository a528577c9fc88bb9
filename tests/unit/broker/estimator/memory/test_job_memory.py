"""Memory that a job of gpubroker's own trainer needs on a device."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.offer import GIB
from broker.domain.workload import Workload
from broker.estimator.architecture.model_states import trained_parameters
from broker.estimator.memory.job_memory import CPU_CONTEXT, GPU_CONTEXT, memory, numerics_of
from tests.support.machines import LLAMA_3_8B, SCRIPT, SMOLLM2_135M, WORK


def peak_gib(work: Workload, **device: Any) -> float:
    need = memory(work, **{"bf16": True, "gpu": True} | device)
    assert need is not None
    return need.peak / GIB


@pytest.mark.parametrize(
    ("method", "batch", "checkpointing", "traced"),
    [
        ("full", 1, False, 121.497),
        ("full", 4, False, 174.810),
        ("full", 4, True, 119.816),
        ("lora", 1, False, 34.063),
        ("lora", 4, False, 89.738),
        ("lora", 4, True, 29.291),
    ],
)
def test_llama_3_8b_agrees_with_its_trace(
    method: Literal["full", "lora"], batch: int, checkpointing: bool, traced: float
) -> None:
    """GiB of `python -m trainer.memtrace`, 2048 tokens, bf16 autocast, fused AdamW, LoRA r 16 on all linear."""
    work = replace(
        WORK, method=method, micro_batch=batch, global_batch=batch, gradient_checkpointing=checkpointing, sequence=2048
    )
    assert peak_gib(work) == pytest.approx(traced, rel=0.0005)


def test_adapters_are_counted_as_peft_counts_them() -> None:
    def trained(work: Workload) -> int:
        return trained_parameters(LLAMA_3_8B, numerics_of(work, LLAMA_3_8B, bf16=True, gpu=True))

    assert trained(WORK) == 41_943_040
    assert trained(replace(WORK, lora_targets="attention")) == 13_631_488
    assert trained(replace(WORK, method="full")) == LLAMA_3_8B.parameters


def test_a_script_has_no_memory_estimate() -> None:
    assert memory(SCRIPT, bf16=True, gpu=True) is None


@pytest.mark.parametrize(
    ("change", "devices", "margin", "words"),
    [
        ({}, 1, 0.05, "equals a trace"),
        ({}, 4, 0.10, "trace of one GPU"),
        ({"shape": replace(LLAMA_3_8B, family="gpt_bigcode")}, 1, 0.05, "equals a trace"),
        ({"shape": replace(LLAMA_3_8B, family="mamba", known=False)}, 1, 1.4, "unknown"),
    ],
)
def test_the_margin_follows_the_evidence(change: dict[str, Any], devices: int, margin: float, words: str) -> None:
    need = memory(replace(WORK, **change), bf16=True, gpu=True, devices=devices)
    assert need is not None
    assert need.margin == margin
    assert words in need.source
    assert need.required == int((need.peak + GPU_CONTEXT) * (1 + margin))


def test_a_cpu_trains_in_fp32_and_holds_the_process_itself() -> None:
    work = replace(WORK, shape=SMOLLM2_135M)
    cpu, gpu = memory(work, bf16=False, gpu=False), memory(work, bf16=True, gpu=True)
    assert cpu is not None
    assert gpu is not None
    assert cpu.context == CPU_CONTEXT
    assert cpu.weights - gpu.weights == 2 * SMOLLM2_135M.parameters


def test_dropout_masks_of_a_cpu_take_more_than_those_of_a_gpu() -> None:
    work = replace(WORK, shape=SMOLLM2_135M, gradient_checkpointing=False)
    assert peak_gib(work, gpu=False) > peak_gib(work) * 1.1


def test_several_gpus_hold_the_buckets_of_all_gradients() -> None:
    work = replace(WORK, method="full", precision="fp32")
    assert peak_gib(work, devices=4) - peak_gib(work) == pytest.approx(4 * LLAMA_3_8B.parameters / GIB, rel=1e-6)


def test_half_precision_trains_fp32_weights_but_keeps_a_lora_base_in_half() -> None:
    lora = numerics_of(WORK, LLAMA_3_8B, bf16=True, gpu=True)
    full = numerics_of(replace(WORK, method="full", precision="fp16"), LLAMA_3_8B, bf16=False, gpu=True)
    assert (lora.weight, lora.trained, lora.autocast) == (2, 4, True)
    assert (full.weight, full.trained, full.compute) == (4, 4, 2)


def test_accumulated_gradients_stay_during_the_forward_pass() -> None:
    one = replace(WORK, method="full", micro_batch=4, global_batch=4, gradient_checkpointing=False)
    more = peak_gib(replace(one, global_batch=8)) - peak_gib(one)
    assert more == pytest.approx(4 * 8_030_261_248 / GIB, rel=0.01)


def test_devices_that_share_the_global_batch_accumulate_only_what_is_left() -> None:
    """Eight rows are two micro-batches of four on one device, and one on each of two."""
    work = replace(WORK, method="full", micro_batch=4, gradient_checkpointing=False)
    once, shared, more = (peak_gib(replace(work, global_batch=n), devices=2) for n in (4, 8, 16))
    assert once == shared
    assert more - shared == pytest.approx(4 * 8_030_261_248 / GIB, rel=0.01)


@settings(max_examples=50)
@given(
    method=st.sampled_from(["full", "lora"]),
    precision=st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
    batch=st.integers(1, 64),
    sequence=st.integers(8, 8192),
    checkpointing=st.booleans(),
    targets=st.sampled_from(["all-linear", "attention"]),
)
def test_more_tokens_never_need_less(
    method: Literal["full", "lora"], precision: str, batch: int, sequence: int, checkpointing: bool, targets: str
) -> None:
    work = replace(
        WORK, method=method, precision=precision, micro_batch=batch, global_batch=batch, sequence=sequence,
        gradient_checkpointing=checkpointing, lora_targets=targets,
    )  # fmt: skip
    base = peak_gib(work)
    assert base > 0
    assert peak_gib(replace(work, sequence=sequence + 1)) >= base
    assert peak_gib(replace(work, micro_batch=batch + 1, global_batch=batch + 1)) >= base
