"""Forecasts of finished jobs against their results."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.spending import FinishedJob, ForecastRecord, error_text, within_text
from broker.domain.workload import MemoryNeed
from broker.reporting.calibration import calibrate, tier_records

NEED = MemoryNeed(
    weights=60, gradients=10, optimizer=10, activations=10, logits=0, context=10, margin=0.2, source="form"
)
"""90 bytes allocated, 100 with the context, 120 required."""
JOB = FinishedJob(
    accelerator="l40s", gpus=1, simulated=False, emulated=False, family="llama", method="lora", task="causal_lm",
    tier="measured", usd_p50=Decimal("2.10"), usd_p90=Decimal("3.10"), bucket_usd=Decimal("0.10"), hours_p50=1.0,
    hours_p90=1.5, memory=NEED, spent_usd=Decimal("2.20"), hours=1.5, peak_bytes=85,
)  # fmt: skip
NONE = ForecastRecord()


def record(judged: int, within: int, error: Any) -> ForecastRecord:
    return ForecastRecord(judged=judged, within=within, median_error=error)


def test_results_are_judged_by_p90_and_their_difference_to_p50() -> None:
    total = calibrate([JOB]).total
    assert (total.by, total.jobs) == ("all", 1)
    assert total.money == record(1, 1, pytest.approx(0.1))  # the bucket is in no charge for machines and traffic
    assert total.time == record(1, 1, 0.5)
    assert total.memory == record(1, 1, pytest.approx(0.05))


def test_results_above_p90_are_outside_and_the_error_is_the_median() -> None:
    late = replace(JOB, spent_usd=Decimal("3.01"), hours=1.51, peak_bytes=111)
    total = calibrate([JOB, late, replace(JOB, hours=1.1)]).total
    assert (total.money.within, total.time.within, total.memory.within) == (2, 2, 2)
    assert total.time.median_error == 0.5


def test_unknown_forecasts_and_results_are_not_judged() -> None:
    script = replace(
        JOB, method="script", family="", tier=None, usd_p50=None, usd_p90=None, hours_p50=None, hours_p90=None,
        memory=None,
    )  # fmt: skip
    report = calibrate([script, replace(JOB, usd_p90=None, hours_p90=None), replace(JOB, hours=None, peak_bytes=None)])
    assert report.rows[0].key == "measured"
    unknown = [row for row in report.rows if row.key == "unknown"]
    assert [row.by for row in unknown] == ["tier", "recipe", "family"]
    assert all((row.jobs, row.money, row.time, row.memory) == (1, NONE, NONE, NONE) for row in unknown)
    assert (report.total.jobs, report.total.money.judged, report.total.time.judged) == (3, 1, 0)
    assert report.total.memory.judged == 1


def test_a_job_out_of_memory_is_outside_without_an_error() -> None:
    assert calibrate([replace(JOB, out_of_memory=True)]).total.memory == record(1, 0, None)


def test_memory_of_an_emulated_gpu_is_unknown_and_a_cpu_has_its_context() -> None:
    assert calibrate([replace(JOB, emulated=True)]).total.memory == NONE
    assert calibrate([replace(JOB, gpus=0, peak_bytes=110)]).total.memory == record(1, 1, pytest.approx(0.1))


def test_an_expectation_of_zero_has_no_error() -> None:
    free = replace(JOB, usd_p50=Decimal(0), usd_p90=Decimal(0), bucket_usd=Decimal(0), spent_usd=Decimal(0))
    assert calibrate([free]).total.money == record(1, 1, None)


def test_groups_are_by_tier_gpu_recipe_and_family_most_jobs_first() -> None:
    other = replace(JOB, accelerator="h100-sxm", simulated=True, method="full", task="dpo", tier="unchecked")
    keys = [(row.by, row.key, row.jobs) for row in calibrate([other, JOB, JOB]).rows]
    assert keys == [
        ("tier", "measured", 2), ("tier", "unchecked", 1), ("gpu", "l40s", 2), ("gpu", "h100-sxm (simulated)", 1),
        ("recipe", "gpubroker lora", 2), ("recipe", "gpubroker full dpo", 1), ("family", "llama", 3),
    ]  # fmt: skip
    assert calibrate([]).rows == ()


def test_each_tier_has_its_record_apart_from_simulated_offers() -> None:
    records = tier_records([
        JOB, replace(JOB, hours=2.0), replace(JOB, simulated=True, hours=1.2), replace(JOB, tier=None),
        replace(JOB, tier="unchecked", hours=None),
    ])  # fmt: skip
    assert records == {
        ("measured", False): "1 of 2 finished jobs of this tier within P90, median error of time 75.0 %",
        ("measured", True): "1 of 1 finished jobs of this tier within P90, median error of time 20.0 %",
    }


def test_few_jobs_are_counts_and_many_are_a_percentage() -> None:
    assert (within_text(0, 0), within_text(19, 18), within_text(20, 18)) == ("unknown", "18 of 19", "90 % of 20")
    assert (error_text(None), error_text(0.0814)) == ("unknown", "8.1 %")
