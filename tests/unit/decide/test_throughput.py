"""The model of time against published and measured speeds, and as a function."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.decide.calibration import SPREAD_CPU, SPREAD_MEASURED, SPREAD_UNMEASURED
from broker.decide.hardware import TABLE, Hardware, matches, nearest
from broker.decide.roofline import ideal, terms
from broker.decide.throughput import Pace, pace, run_of, spread_of, timing
from broker.domain.workload import ModelShape, Workload
from tests.unit.decide.machines import LLAMA_3_8B, SMOLLM2_135M, WORK

GPUS = [h for h in TABLE.values() if h.gpu]


def step_s(
    work: Workload, shape: ModelShape, hardware: Hardware, *, cores: int = 1, devices: int = 1, nodes: int = 1
) -> float:
    return terms(ideal(run_of(work, shape, hardware, devices=devices, nodes=nodes), hardware, cores=cores)).total


def paced(work: Workload, hardware: Hardware, *, cores: int = 1, local: bool = False) -> Pace:
    assert work.shape is not None
    return pace(work, timing(run_of(work, work.shape, hardware), hardware, cores=cores), local=local)


def test_the_demo_model_on_two_cores() -> None:
    """2.2 rows/s were measured: LoRA r 16, rows of 80 to 100 tokens, fp32; the `cpu` entry is calibrated on it."""
    work = Workload(
        shape=SMOLLM2_135M, method="lora", lora_r=16, micro_batch=4, global_batch=8, sequence=128, tokens_per_row=90
    )
    assert 8 / step_s(work, SMOLLM2_135M, TABLE["cpu"], cores=2) == pytest.approx(2.2, rel=0.1)


def test_a_cpu_has_one_core_at_least_and_a_gpu_ignores_cores() -> None:
    cpu, gpu = TABLE["cpu"], TABLE["l4"]
    assert paced(WORK, cpu, cores=0) == paced(WORK, cpu, cores=1)
    assert paced(WORK, gpu, cores=64) == paced(WORK, gpu)


def test_short_rows_of_a_small_model_are_bound_by_the_host() -> None:
    work = replace(WORK, shape=SMOLLM2_135M, tokens_per_row=20, gradient_checkpointing=False)
    fast, slow = (step_s(work, SMOLLM2_135M, TABLE[name]) for name in ("b200", "a100-80gb-sxm"))
    assert fast == pytest.approx(slow, rel=0.05)


def test_weights_on_this_machine_load_faster() -> None:
    there, here = paced(WORK, TABLE["h100-sxm"]), paced(WORK, TABLE["h100-sxm"], local=True)
    assert here.load_s < there.load_s
    assert here.work_s == there.work_s


def test_an_evaluation_takes_less_than_training_on_as_many_rows() -> None:
    none = replace(WORK, eval_rows=0)
    rows = WORK.steps * WORK.global_batch
    evaluated = paced(replace(WORK, eval_rows=rows), TABLE["l40s"]).work_s - paced(none, TABLE["l40s"]).work_s
    assert 0 < evaluated < paced(none, TABLE["l40s"]).work_s / 2


def test_fp32_is_slower_and_fp16_is_not() -> None:
    h100 = TABLE["h100-sxm"]
    auto, fp16, fp32 = (step_s(replace(WORK, precision=p), LLAMA_3_8B, h100) for p in ("auto", "fp16", "fp32"))
    assert auto == fp16 < fp32


def test_adapters_on_the_attention_alone_cost_less() -> None:
    h100 = TABLE["h100-sxm"]
    every = step_s(WORK, LLAMA_3_8B, h100)
    assert step_s(replace(WORK, lora_targets="attention"), LLAMA_3_8B, h100) < every


def test_an_interval_is_wider_where_less_was_measured() -> None:
    measured, unknown = TABLE["a100-80gb-sxm"], TABLE["rtx4090"]
    run = run_of(WORK, LLAMA_3_8B, measured)
    assert spread_of(run, measured)[0] == SPREAD_MEASURED < SPREAD_UNMEASURED < SPREAD_CPU
    assert spread_of(run_of(WORK, LLAMA_3_8B, measured, devices=8), measured)[0] == SPREAD_UNMEASURED
    factor, evidence = spread_of(run, unknown)
    assert (factor, "nothing fitted on the rtx4090" in evidence) == (SPREAD_UNMEASURED, True)
    assert paced(WORK, TABLE["cpu"]).spread == SPREAD_CPU


@given(st.sampled_from(GPUS), st.sampled_from(["full", "lora"]))
def test_eight_devices_are_faster_than_one_but_not_more_than_eightfold(
    hardware: Hardware, method: Literal["full", "lora"]
) -> None:
    work = replace(WORK, method=method, global_batch=64)
    one, eight = (step_s(work, LLAMA_3_8B, hardware, devices=n) for n in (1, 8))
    assert one / 8 <= eight
    assert method == "full" or eight < one


@given(st.sampled_from(GPUS), st.sampled_from([2, 4, 8]))
def test_devices_on_several_machines_are_slower_than_on_one(hardware: Hardware, nodes: int) -> None:
    slow = replace(hardware, network=hardware.link / 8)
    work = replace(WORK, method="full", global_batch=64)
    one, several = (step_s(work, LLAMA_3_8B, slow, devices=8, nodes=n) for n in (1, nodes))
    assert one < several


@given(st.sampled_from(list(TABLE.values())), st.integers(1, 10**5), st.floats(1, 8192), st.floats(1.0, 1000.0))
def test_more_work_takes_longer(hardware: Hardware, steps: int, tokens: float, more: float) -> None:
    work = replace(WORK, steps=steps, tokens_per_row=tokens)
    base = paced(work, hardware).work_s
    assert paced(replace(work, steps=steps + 1), hardware).work_s > base
    assert paced(replace(work, tokens_per_row=tokens + more), hardware).work_s >= base


def test_a_family_of_gpus_is_asked_for_by_its_prefix() -> None:
    assert matches("a100", "a100-80gb-sxm")
    assert matches("a100-80gb", "a100-80gb-pcie")
    assert matches("l4", "l4")
    assert matches("a100-pcie", "a100-80gb-pcie")
    assert not matches("a100-pcie", "a100-80gb-sxm")
    assert not matches("l4", "l40s")
    assert not matches("sxm", "h100-sxm")


def test_the_nearest_gpu_is_one_of_the_table() -> None:
    assert nearest("l40") == ["l40s"]
    assert not nearest("abacus")
