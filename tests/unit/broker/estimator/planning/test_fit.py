"""Fit of a workload on a machine, and the message if it does not fit."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from broker.domain.offer import GIB, DropReason
from broker.estimator.planning import fit as fits
from broker.estimator.planning.fit import fit, probed
from broker.estimator.speed.hardware import TABLE
from tests.support.machines import LLAMA_3_8B, SCRIPT, SMOLLM2_135M, WORK, offer


def test_a_fit_states_needed_and_available_memory() -> None:
    found = fit(WORK, offer())
    assert found.drop is None
    assert found.reason.startswith("fits: ")
    assert "of 80.0 GiB" in found.reason
    assert found.pace is not None


def test_too_little_memory_says_need_and_has() -> None:
    found = fit(WORK, offer(accelerator="l4", gpu_memory_bytes=16 * GIB))
    assert found.drop is DropReason.MEMORY
    assert found.reason.endswith("GiB per GPU, has 16.0")
    assert found.memory is not None


def test_an_offer_that_does_not_say_its_memory_has_the_gpus_own() -> None:
    assert "of 80.0 GiB" in fit(WORK, offer(gpu_memory_bytes=0)).reason


def test_unknown_hardware_is_named() -> None:
    for unknown in (offer(accelerator="tpu-v5"), offer(emulated_on="abacus")):
        found = fit(WORK, unknown)
        assert found.drop is DropReason.UNKNOWN_HARDWARE
        assert ("tpu-v5" in found.reason) or ("abacus" in found.reason)


def test_gpus_without_a_micro_batch_are_reported_as_idle() -> None:
    found = fit(replace(WORK, global_batch=2), offer(gpus=8))
    assert found.devices == 2
    assert "uses 2 of 8 GPUs" in found.reason
    assert fit(WORK, offer(gpus=8)).devices == 8


def test_several_machines_share_the_work_over_a_slower_link() -> None:
    one, two = fit(WORK, offer(gpus=4)), fit(WORK, offer(gpus=4), nodes=2)
    eight = fit(WORK, offer(gpus=8))
    assert two.devices == 8
    assert one.pace is not None
    assert two.pace is not None
    assert eight.pace is not None
    assert eight.pace.step_s < two.pace.step_s < one.pace.step_s
    assert fit(WORK, offer(emulated_on="cpu"), nodes=2).devices == 2
    assert fit(SCRIPT, offer(gpus=4), nodes=2).devices == 8


def test_a_simulated_gpu_is_as_fast_as_its_hosts_hardware() -> None:
    small = replace(WORK, shape=SMOLLM2_135M)
    real = fit(small, offer())
    emulated = fit(small, offer(gpus=8, emulated_on="cpu", emulated_vcpus=2))
    assert emulated.memory == real.memory
    assert emulated.devices == 1
    assert emulated.pace == fit(small, offer(emulated_on="cpu", vcpus=2)).pace
    assert emulated.pace is not None
    assert real.pace is not None
    assert emulated.pace.work_s > 10 * real.pace.work_s


def test_a_cpu_machine_by_its_own_memory() -> None:
    small = replace(WORK, shape=SMOLLM2_135M)
    cpu = offer(accelerator="cpu", gpus=0, vcpus=2, gpu_memory_bytes=16 * GIB)
    assert fit(small, cpu).drop is None
    assert "of memory, has 1.0" in fit(small, replace(cpu, gpu_memory_bytes=GIB)).reason
    found = fit(replace(small, precision="bf16"), cpu)
    assert (found.drop, "precision auto" in found.reason) == (DropReason.MEMORY, True)


def test_a_script_fits_anywhere_and_uses_every_gpu() -> None:
    found = fit(SCRIPT, offer(accelerator="tpu-v5", gpus=4))
    assert (found.drop, found.pace, found.memory, found.devices) == (None, None, None, 4)


@given(st.sampled_from(sorted(TABLE)), st.integers(1, 300 * GIB), st.integers(0, 300 * GIB), st.integers(1, 8))
def test_more_memory_never_turns_a_fit_into_none(name: str, memory: int, more: int, gpus: int) -> None:
    lesser = offer(accelerator=name, gpu_memory_bytes=memory, gpus=gpus)
    if fit(WORK, lesser).drop is None:
        assert fit(WORK, replace(lesser, gpu_memory_bytes=memory + more)).drop is None


def test_a_simulated_gpu_computes_on_its_hosts_hardware() -> None:
    assert fits.computing(offer(emulated_on="cpu")) is TABLE["cpu"]
    assert fits.computing(offer()) is TABLE["h100-sxm"]


def test_a_task_that_is_not_estimated_says_so() -> None:
    found = fit(replace(WORK, shape=None, unestimated="task dpo is not estimated"), offer())
    assert (found.drop, found.memory, found.pace) == (None, None, None)
    known = "task dpo is not estimated: its memory and its time are not known"
    assert found.reason == f"{known}; its longest rows are tried after the first step"


def test_uncertain_estimates_are_probed_before_the_long_run() -> None:
    strange = replace(LLAMA_3_8B, family="strange", known=False)
    assert [probed(w, None) for w in (SCRIPT, WORK, replace(WORK, shape=None), replace(WORK, shape=strange))] == [
        False, False, True, True,
    ]  # fmt: skip
    roomy = offer(gpu_memory_bytes=192 * GIB)
    assert "its longest rows are tried" in fit(replace(WORK, shape=strange), roomy).reason
    assert "tried" not in fit(WORK, roomy).reason
    full = replace(WORK, method="full", lora_r=0)
    divided = fit(full, offer(gpus=8))
    assert divided.plan is not None
    assert probed(full, divided.plan)
    assert divided.reason.endswith("its longest rows are tried after the first step")
