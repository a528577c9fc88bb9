"""Shipped figures equal the benchmark's fit, and their intervals cover the share that they state."""

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import throughput_table as table
from benchmarks.throughput_fit import fitted, quantile, surprise
from benchmarks.throughput_rows import Row, everything, fms
from broker.estimator.speed.calibration import FITTED, SPREAD_MEASURED, SPREAD_UNMEASURED
from broker.sizing.estimate import estimate

ROWS, REFUSED = everything()
USED = [r for r in ROWS if r.source != table.HELD_OUT]


def off(row: Row) -> float:
    return abs(math.expm1(surprise(row, FITTED)))


def test_the_shipped_shares_are_those_that_the_rows_give() -> None:
    found = fitted(USED)
    for name in ("matmul_else", "attention_else", "bandwidth", "modules", "between", "exposed", "sync_s"):
        assert getattr(found, name) == pytest.approx(getattr(FITTED, name), rel=2e-3), name
    assert found.matmul == pytest.approx(dict(FITTED.matmul), rel=2e-3)
    assert found.attention == pytest.approx(dict(FITTED.attention), rel=2e-3)


def test_every_row_is_estimated_or_refused_with_a_reason() -> None:
    assert (len(ROWS), len(REFUSED)) == (237, 101)
    assert {r.gpu for r in ROWS if r.source == table.HELD_OUT} == {"l40s"}
    assert "l40s" not in FITTED.matmul


@pytest.mark.parametrize(("method", "named", "rows"), [("qlora", "baseline-peft-bnb", 4), ("lora", "none", 8)])
def test_the_benchmark_scores_the_speed_that_estimate_reports(method: str, named: str, rows: int) -> None:
    """`estimate` with the libraries of a measured row, whose checkpointing recomputes whole blocks."""
    name = f"Mistral-7B {named} {method} batch {rows}, 1 GPU"
    (row,) = (r for r in fms() if isinstance(r, Row) and r.name == name)
    estimated = estimate(
        "mistralai/Mistral-7B-v0.1", method=method, optimizer="adamw_foreach", seq=4096, micro_batch=rows,
        precision="bf16-autocast" if method == "qlora" else "bf16", gradient_checkpointing=True, attention="flash",
        lora_targets="q_proj,k_proj,v_proj,o_proj", lora_dropout=0.1, stack="transformers=4.48.1", gpu="A100-80GB",
    )  # fmt: skip
    assert estimated["tokens_per_s"] == pytest.approx(row.rate * math.exp(surprise(row, FITTED)), rel=1e-3)


def test_an_unfitted_gpu_and_unfitted_libraries_are_close() -> None:
    """L40S: nothing was fitted on it. torchtitan's H100 is a slower kind that has no shares of its own."""
    assert all(off(r) < 0.15 for r in ROWS if r.source == "peft")
    assert all(off(r) < 0.08 for r in ROWS if r.source == "torchtitan")
    assert sum(off(r) < 0.12 for r in ROWS if r.source == "fms") >= 16


def test_benchmark_ends_with_figures_within_shipped_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark ends with its figures and the shipped intervals hold."""
    monkeypatch.setattr(sys, "argv", ["throughput_table", "--rows"])
    table.main()
    lines = capsys.readouterr().out.strip().splitlines()
    told = json.loads(lines[-1])
    assert told["n"] == 237
    assert told["lomo_median_pct"] <= 3
    assert told["lomo_p90_pct"] <= 8
    assert told["unseen_gpu_no_run_median_pct"] <= 12
    assert told["unseen_gpu_one_run_median_pct"] <= 5
    assert told["coverage_90"] >= 0.88
    assert told["coverage_of_unseen_groups"] == 0.9  # the docs say so
    assert told["coverage_of_later_rows"] == 0.947
    assert f"'SPREAD_MEASURED': {SPREAD_MEASURED:g}" in lines[-3]
    assert any("rtx4090" in line and "no measurement yet" in line for line in lines)
    assert SPREAD_MEASURED < SPREAD_UNMEASURED


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60), st.floats(0.5, 0.99))
def test_a_conformal_width_holds_at_least_the_share_it_states(surprises: list[float], coverage: float) -> None:
    width = quantile(surprises, coverage)
    inside = sum(abs(s) <= width for s in surprises)
    assert inside >= min(len(surprises), (len(surprises) + 1) * coverage) - 1e-9
