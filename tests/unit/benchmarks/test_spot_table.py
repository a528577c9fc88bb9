"""The intervals of `benchmarks.spot_table` count traces, not their overlapping windows."""

import random

import pytest

from benchmarks.spot_table import Totals, interval


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
