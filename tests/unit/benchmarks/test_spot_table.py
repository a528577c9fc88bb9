"""The figures of `benchmarks.spot_table`: windows know their past only, and intervals count whole traces."""

import random

import pytest

from benchmarks.spot_table import TableJob, Totals, cells, differences, interval, measured, summary
from broker.simulation.traces import Trace


def test_interval_draws_whole_traces() -> None:
    """Two traces with equal windows each are two observations, so the interval reaches both."""
    totals = Totals({"a": [1.0] * 50, "b": [2.0] * 50})
    assert totals.mean() == pytest.approx(1.5)
    assert interval(totals.by_trace, random.Random(1)) == (1.0, 2.0)


def test_interval_weighs_each_window_equally() -> None:
    """A trace with more windows has more weight in a draw, as in the mean."""
    low, high = interval({"a": [1.0], "b": [2.0] * 3}, random.Random(1))
    assert (low, high) == (1.0, 2.0)
    assert Totals({"a": [1.0], "b": [2.0] * 3}).mean() == pytest.approx(1.75)


def market_of(name: str) -> list[Trace]:
    up = tuple(tick % 5 != 4 for tick in range(40))
    return [
        Trace(name=f"{zone}_{name}", tick_s=600, available=up, spot_usd=(1.0,) * 40, on_demand_usd=3.0) for zone in "ab"
    ]


def test_the_summary_has_figures_of_all_tables_and_counts_only_the_product() -> None:
    job, names = TableJob(work_s=3600, changeover_s=360), ("product", "uniform progress")
    totals: dict[str, dict[float, Totals]] = {name: {1.5: Totals()} for name in names}
    for cell in cells([market_of("gpu_1x2")], 1.5, job, 3):
        for name, result in measured((cell, names)).items():
            assert result.ratio > 1 - 1e-9
            assert not result.is_late
            totals[name][1.5].add(cell.zones[0].name, result)
    figures = summary({"single": {}, "nodes": totals})
    assert figures["single"] is figures["uniform_progress"] is None
    assert figures["nodes"] == {"1.5": pytest.approx(totals["product"][1.5].mean(), abs=1e-4)}
    assert (figures["misses"], figures["n"]) == (0, 3)


def test_a_window_knows_its_past_only() -> None:
    """The windows are spread over the trace; what follows a window is not a history of it."""
    job, zones = TableJob(work_s=3600, changeover_s=360), market_of("gpu_1")
    made = cells([zones], 1.5, job, 2)
    assert [len(cell.zones[0].available) for cell in made] == [9, 9]
    assert [[len(zone.available) for zone in cell.past] for cell in made] == [[], [31, 31]]
    assert made[1].past[0].available == zones[0].available[:31]
    assert cells([zones], 20, job, 2) == []


def test_differences_pair_the_same_windows() -> None:
    assert differences({"a": [1.0, 3.0]}, {"a": [2.0, 2.5]}) == {"a": [-1.0, 0.5]}
