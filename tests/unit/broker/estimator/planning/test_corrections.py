"""Observations of ended attempts move later estimates of speed and memory, and no other values."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import attempt_id
from broker.domain.job import Attempt, Job, Reason
from broker.domain.offer import GIB, DropReason, QuoteLine
from broker.domain.workload import MemoryNeed, ModelShape, Plan, RunObservation, Workload
from broker.estimator.memory.evidence import MAX_FACTOR
from broker.estimator.planning.corrections import (
    MIN_CORRECTION,
    NO_CORRECTIONS,
    ComparedRun,
    Corrections,
    assess,
    learn,
    memory_key,
    observed,
)
from broker.estimator.planning.fit import fit
from broker.estimator.planning.plan_search import Planner
from broker.estimator.speed.hardware import TABLE
from broker.estimator.speed.throughput import step_seconds
from broker.lifecycle.recovery import adjust_plan
from tests.support import build
from trainer.contract.documents import Final, Heartbeat, Outcome

SHAPE = ModelShape(
    name="secret-name", family="llama", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64,
    vocabulary=128_256, tied_embeddings=True, parameters=1_235_814_400, known=True,
)  # fmt: skip
WORK = Workload(
    shape=SHAPE, method="lora", lora_r=16, micro_batch=4, global_batch=24, sequence=2048, tokens_per_row=1000.0,
    steps=100,
)  # fmt: skip
OFFER = build.offer()
L40S = TABLE["l40s"]
PLAN = Plan(micro_batch=4, accumulation=6)


def estimated_rate(work: Workload = WORK) -> float:
    return work.global_batch * work.tokens_per_row / step_seconds(Planner(work).run(PLAN, L40S), L40S)


def estimated_need(work: Workload = WORK) -> MemoryNeed:
    return Planner(work).need(plan_of(work), L40S)


def plan_of(work: Workload) -> Plan:
    rows = work.micro_batch
    checkpointing = work.gradient_checkpointing
    return Plan(micro_batch=rows, accumulation=work.global_batch // rows, gradient_checkpointing=checkpointing)


def seen(number: int = 1, **changes: Any) -> RunObservation:
    values: dict[str, Any] = {
        "attempt_id": attempt_id(build.JOB_ID, number), "hardware": "l40s", "nodes": 1, "cores": 8,
        "workload": WORK, "device_bytes": OFFER.gpu_memory_bytes,
    }  # fmt: skip
    values |= changes
    return RunObservation(**({"plan": plan_of(values["workload"]) if values["workload"].shape else PLAN} | values))


def knows(*observations: RunObservation) -> Corrections:
    found = [assess(observation) for observation in observations]
    assert all(isinstance(observation, ComparedRun) for observation in found)
    return learn([observation for observation in found if observation is not None])


def ended(**changes: Any) -> Attempt:
    new = build.attempt().id
    final = {"attempt": new, "outcome": Outcome.COMPLETED, "step": 40, "tokens_per_s": 5000.0, "peak_memory_bytes": GIB}
    given_final = changes.pop("final", {})
    made = None if given_final is None else Final.model_validate(final | given_final)
    return build.attempt(**({"final": made, "line": line()} | changes))


def line(**changes: Any) -> QuoteLine:
    return replace(build.line(**changes), plan=PLAN)


JOB = build.active_job(workload=WORK)


# ------------------------------------------------------------------------------------------------------------ observed


def test_an_ended_attempt_leaves_its_speed_and_its_peak_and_no_name() -> None:
    found = observed(JOB, ended())
    assert found is not None
    assert (found.hardware, found.tokens_per_s, found.peak_bytes) == ("l40s", 5000.0, GIB)
    assert found.device_bytes == OFFER.gpu_memory_bytes
    assert "secret-name" not in repr(found)


def test_preempted_run_counts_by_its_last_heartbeat_if_long_enough() -> None:

    def preempted(step: int, resumed: int) -> RunObservation | None:
        beat = Heartbeat(attempt="a", boot="b", seq=1, step=step, resumed_from=resumed, tokens_per_s=900.0)
        return observed(JOB, ended(final=None, beat=beat, reason=Reason.PREEMPTED))

    long = preempted(60, 50)
    assert long is not None
    assert long.tokens_per_s == 900.0
    assert preempted(59, 50) is None


@pytest.mark.parametrize(
    ("job", "attempt"),
    [
        (build.active_job(), ended()),
        (JOB, ended(line=build.line())),
        (JOB, build.attempt(line=line())),
        (JOB, ended(line=line(accelerator="mystery"))),
        (JOB, ended(final={"step": 3, "resumed_from": 3})),
        (JOB, ended(final={"tokens_per_s": None, "peak_memory_bytes": None})),
    ],
    ids=["a script", "no plan", "no word", "unknown hardware", "no step", "no figures"],
)
def test_attempts_without_measurements_leave_no_observation(job: Job, attempt: Attempt) -> None:
    assert observed(job, attempt) is None


def test_few_steps_tell_of_memory_and_not_of_speed() -> None:
    found = observed(JOB, ended(final={"step": 3}))
    assert found is not None
    assert (found.tokens_per_s, found.peak_bytes) == (None, GIB)


def test_simulated_machine_reports_processor_not_gpu_memory() -> None:
    """A simulated machine reports the processor and its cores, and no peak of GPU memory."""
    simulated = line(emulated_on="cpu", emulated_vcpus=2)
    found = observed(JOB, ended(line=simulated, reason=Reason.OOM))
    assert found is not None
    assert (found.hardware, found.cores, found.peak_bytes, found.out_of_memory) == ("cpu", 2, None, False)


def test_gpu_memory_exhaustion_is_recorded_with_its_limit() -> None:
    short = {"outcome": Outcome.OOM, "step": 0, "tokens_per_s": None, "ran_out": "device"}
    found = observed(JOB, ended(final=short, reason=Reason.OOM))
    assert found is not None
    assert (found.out_of_memory, found.peak_bytes) == (True, None)
    assert observed(JOB, ended(final=short | {"ran_out": "host"}, reason=Reason.OOM)) is None


# --------------------------------------------------------------------------------------------------------------- speed


def test_a_run_moves_the_next_estimate_and_narrows_its_interval() -> None:
    before, now = fit(WORK, OFFER), fit(WORK, OFFER, learned=knows(seen(tokens_per_s=0.9 * estimated_rate())))
    assert before.pace is not None
    assert now.pace is not None
    assert 1.05 < now.pace.step_s / before.pace.step_s < 1 / 0.9
    assert now.pace.spread < before.pace.spread
    assert (before.pace.runs, now.pace.runs) == (0, 1)
    ready = knows(seen(tokens_per_s=0.9 * estimated_rate()))
    ready.prepare("l40s")
    assert fit(WORK, OFFER, learned=ready).pace == now.pace
    assert "by 1 observed run on such hardware" in now.pace.evidence
    other_gpu = replace(OFFER, accelerator="l4", gpu_memory_bytes=TABLE["l4"].memory_bytes)
    learned = knows(seen(tokens_per_s=0.9 * estimated_rate()))
    assert fit(WORK, other_gpu, learned=learned).pace == fit(WORK, other_gpu).pace


def test_a_speed_counts_as_measured_once_own_runs_of_its_like_were_seen() -> None:
    work = replace(WORK, shape=replace(SHAPE, family="granite"))
    rate = estimated_rate(work)
    tiers = []
    for learned in (Corrections(), knows(seen(tokens_per_s=rate)), knows(seen(workload=work, tokens_per_s=rate))):
        found = fit(work, OFFER, learned=learned).pace
        assert found is not None
        tiers.append(found.tier)
    assert tiers == ["unchecked", "unchecked", "measured"], "of another family nothing was seen"


@pytest.mark.parametrize("rate", [1e9, 0.0, None])
def test_impossible_speeds_are_ignored(rate: float | None) -> None:
    assert knows(seen(tokens_per_s=rate)).speeds == {}


def test_hardware_that_is_not_in_the_table_any_more_is_left_out() -> None:
    assert assess(seen(hardware="mystery")) is None
    assert assess(seen(workload=replace(WORK, shape=None))) is None


# -------------------------------------------------------------------------------------------------------------- memory


@given(st.lists(st.floats(0.5, 1.8), min_size=1, max_size=6), st.integers(1, 4))
def test_no_estimate_is_below_what_its_like_was_seen_to_need(shares: list[float], rows: int) -> None:
    work = replace(WORK, micro_batch=rows)
    plain = estimated_need(work)
    peaks = [min(OFFER.gpu_memory_bytes, int(plain.peak * share)) for share in shares]
    learned = knows(*(seen(n, workload=work, peak_bytes=peak) for n, peak in enumerate(peaks, 1)))
    need = learned.need(work, plain, True, False)
    assert need.required >= max(peaks) + need.context
    assert MIN_CORRECTION * plain.peak - 1 <= need.peak <= MAX_FACTOR * plain.peak


def test_different_runs_narrow_the_margin_and_repeats_do_not() -> None:

    def known(works: list[Workload]) -> MemoryNeed:
        learned = knows(*(seen(n, workload=w, peak_bytes=estimated_need(w).peak) for n, w in enumerate(works, 1)))
        return learned.need(WORK, estimated_need(), True, False)

    once, repeated = known([WORK]), known([WORK] * 5)
    several = known([replace(WORK, sequence=length) for length in (512, 1024, 1500, 2048, 3000)])
    assert repeated == once
    assert several.margin < once.margin < estimated_need().margin
    assert several.correction == pytest.approx(1.0, abs=0.01)
    assert "by 5 observed runs" in several.source


def test_peaks_above_the_estimate_raise_it_for_other_plans_too() -> None:
    works = [replace(WORK, sequence=length) for length in (512, 1024, 1500)]
    learned = knows(*(seen(n, workload=w, peak_bytes=int(1.1 * estimated_need(w).peak)) for n, w in enumerate(works)))
    raised = learned.need(WORK, estimated_need(), True, False)
    assert raised.correction > 1.04
    assert raised.required > estimated_need().required


def test_a_peak_larger_than_the_device_is_not_believed() -> None:
    assert knows(seen(peak_bytes=OFFER.gpu_memory_bytes + 1)).floors == {}


def test_a_process_on_a_cpu_is_measured_with_its_own_context() -> None:
    need = Planner(WORK).need(PLAN, TABLE["cpu"])
    base: dict[str, Any] = {"hardware": "cpu", "device_bytes": 256 * GIB}
    learned = knows(seen(**base, peak_bytes=need.peak + need.context))
    assert [y for _, y in learned.peaks] == [pytest.approx(0.0)]
    assert knows(seen(**base, peak_bytes=need.context)).peaks == []


def test_plan_that_ran_out_is_avoided_until_seen_to_fit() -> None:
    has = int(1.2 * estimated_need().required)
    offer = replace(OFFER, gpu_memory_bytes=has)
    assert fit(WORK, offer).drop is None
    short = seen(1, out_of_memory=True, device_bytes=has)
    again = fit(replace(WORK, steps=7), offer, learned=knows(short))
    assert again.drop is DropReason.MEMORY
    assert again.memory is not None
    assert "has run out of memory" in again.memory.source
    smaller = replace(WORK, micro_batch=2, gradient_checkpointing=True)
    assert fit(smaller, offer, learned=knows(short)).drop is None
    other = seen(2, workload=smaller, device_bytes=has, peak_bytes=GIB)
    assert fit(WORK, offer, learned=knows(short, other)).drop is DropReason.MEMORY
    fits = seen(3, device_bytes=has, peak_bytes=estimated_need().peak)
    assert fit(WORK, offer, learned=knows(short, fits)).drop is None


def test_one_false_report_does_not_raise_all_estimates() -> None:
    short = seen(out_of_memory=True, device_bytes=80 * GIB)
    need = knows(short).need(WORK, estimated_need(), True, False)
    assert need.correction == MAX_FACTOR


def test_a_jobs_own_plan_change_counts_at_once() -> None:
    job = build.job(workload=WORK)
    changed = adjust_plan(job, line(gpu_memory_bytes=int(1.2 * estimated_need().required)), host=False)
    need = NO_CORRECTIONS.need(replace(WORK, memory_factor=changed.memory_factor), estimated_need(), True, False)
    assert need.correction == changed.memory_factor > 1


def test_runs_are_alike_if_they_need_the_same_memory() -> None:
    same = replace(WORK, steps=1, eval_rows=9, tokens_per_row=3.0, shape=replace(SHAPE, name="other", bundled=True))
    assert memory_key(same) == memory_key(WORK)
    assert memory_key(replace(WORK, micro_batch=2)) != memory_key(WORK)


def test_sharded_runs_correct_only_the_speed() -> None:
    plan = Plan(parallelism="fsdp", devices=8, micro_batch=1, accumulation=3)
    learned = knows(seen(plan=plan, peak_bytes=GIB, tokens_per_s=1000.0))
    assert len(learned.speeds["l40s"]) == 1
    assert (learned.floors, learned.peaks) == ({}, [])
    sharded = knows(seen(peak_bytes=GIB)).need(replace(WORK, memory_factor=1.5), estimated_need(), True, True)
    assert (sharded.correction, sharded.floor) == (1.5, 0)


def test_evidence_names_the_record_of_its_tier_and_market() -> None:
    learned = Corrections(records={("measured", False): "3 of 4 held"})
    assert learned.with_record("own runs", "measured", simulated=False) == "own runs; 3 of 4 held"
    assert learned.with_record("own runs", "measured", simulated=True) == "own runs"
    assert learned.with_record("counted", "unchecked", simulated=False) == "counted"
