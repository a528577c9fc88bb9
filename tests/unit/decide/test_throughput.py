"""The roofline against published and measured speeds, and as a function."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.decide.hardware import TABLE, matches
from broker.decide.throughput import pace, step_seconds, useful_devices
from broker.domain.offer import Workload
from tests.unit.decide.machines import LLAMA_3_8B, MISTRAL_7B, SCRIPT, SMOLLM2_135M, WORK


@pytest.mark.parametrize(
    ("method", "batch", "measured"),
    [("full", 4, 3062.7), ("full", 8, 3143.1), ("lora", 4, 3324.2), ("lora", 8, 3353.8)],
)
def test_mistral_on_an_a100(method: Literal["full", "lora"], batch: int, measured: float) -> None:
    """Tokens/s of fms-acceleration a100_80gb.csv (commit 876e2ed, Apache-2.0), checkpointing on, sequence 4096."""
    work = Workload(
        shape=MISTRAL_7B, method=method, lora_r=16, lora_targets="attention", gradient_checkpointing=True,
        micro_batch=batch, global_batch=batch, sequence=4096, tokens_per_row=4096,
    )  # fmt: skip
    seconds = step_seconds(work, MISTRAL_7B, TABLE["a100-80gb-sxm"])
    assert batch * 4096 / seconds == pytest.approx(measured, rel=0.15)


def test_the_demo_model_on_two_cores() -> None:
    """2.2 rows/s were measured: LoRA r 16, rows of 80 to 100 tokens, fp32; the `cpu` entry is calibrated on it."""
    work = Workload(
        shape=SMOLLM2_135M, method="lora", lora_r=16, micro_batch=4, global_batch=8, sequence=128, tokens_per_row=90
    )
    assert 8 / step_seconds(work, SMOLLM2_135M, TABLE["cpu"], cores=2) == pytest.approx(2.2, rel=0.1)


def test_nothing_is_said_about_a_script() -> None:
    assert pace(SCRIPT, TABLE["h100-sxm"]) is None


def test_a_cpu_has_one_core_at_least_and_a_gpu_ignores_cores() -> None:
    cpu, gpu = TABLE["cpu"], TABLE["l4"]
    assert pace(WORK, cpu, cores=0) == pace(WORK, cpu, cores=1)
    assert pace(WORK, gpu, cores=64) == pace(WORK, gpu)


def test_short_rows_of_a_small_model_are_bound_by_the_host() -> None:
    work = replace(WORK, shape=SMOLLM2_135M, tokens_per_row=20, gradient_checkpointing=False)
    fast, slow = (step_seconds(work, SMOLLM2_135M, TABLE[name]) for name in ("b200", "a100-80gb-sxm"))
    assert fast == pytest.approx(slow, rel=0.05)


def test_weights_on_this_machine_load_faster() -> None:
    there, here = pace(WORK, TABLE["h100-sxm"]), pace(WORK, TABLE["h100-sxm"], local=True)
    assert there is not None
    assert here is not None
    assert here.load_s < there.load_s
    assert here.work_s == there.work_s


def test_fp32_is_slower_and_fp16_is_not() -> None:
    h100 = TABLE["h100-sxm"]
    auto, fp16, fp32 = (step_seconds(replace(WORK, precision=p), LLAMA_3_8B, h100) for p in ("auto", "fp16", "fp32"))
    assert auto == fp16 < fp32


def test_adapters_on_the_attention_alone_cost_less() -> None:
    h100 = TABLE["h100-sxm"]
    every = step_seconds(WORK, LLAMA_3_8B, h100)
    assert step_seconds(replace(WORK, lora_targets="attention"), LLAMA_3_8B, h100) < every


@pytest.mark.parametrize(
    ("micro", "total", "gpus", "devices"),
    [(4, 32, 8, 8), (4, 32, 3, 2), (4, 12, 8, 3), (8, 8, 8, 1), (1, 7, 4, 1), (1, 8, 0, 1)],
)
def test_devices_share_the_micro_batches_evenly(micro: int, total: int, gpus: int, devices: int) -> None:
    assert useful_devices(replace(WORK, micro_batch=micro, global_batch=total), gpus) == devices


@given(st.sampled_from([h for h in TABLE.values() if h.gpu]), st.sampled_from(["full", "lora"]))
def test_eight_devices_are_faster_than_one_but_not_more_than_eightfold(
    hardware: object, method: Literal["full", "lora"]
) -> None:
    h = next(h for h in TABLE.values() if h is hardware)
    work = replace(WORK, method=method, global_batch=64)
    one, eight = (step_seconds(work, LLAMA_3_8B, h, devices=n) for n in (1, 8))
    assert one / 8 <= eight
    assert method == "full" or eight < one


@given(st.sampled_from(list(TABLE.values())), st.integers(1, 10**5), st.floats(1, 8192), st.floats(1.0, 1000.0))
def test_more_work_takes_longer(hardware: object, steps: int, tokens: float, more: float) -> None:
    h = next(h for h in TABLE.values() if h is hardware)
    work = replace(WORK, steps=steps, tokens_per_row=tokens)
    base = pace(work, h)
    longer = (pace(replace(work, steps=steps + 1), h), pace(replace(work, tokens_per_row=tokens + more), h))
    assert base is not None
    assert all(p is not None and p.work_s > base.work_s for p in longer[:1])
    assert longer[1] is not None
    assert longer[1].work_s >= base.work_s


def test_a_family_of_gpus_is_asked_for_by_its_prefix() -> None:
    assert matches("a100", "a100-80gb-sxm")
    assert matches("a100-80gb", "a100-80gb-pcie")
    assert matches("l4", "l4")
    assert not matches("l4", "l40s")
