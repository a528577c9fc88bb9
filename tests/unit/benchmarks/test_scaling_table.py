"""Rows that differ in their number of GPUs alone are compared with each other."""

import pytest

from benchmarks.scaling_table import devices, efficiencies, series
from benchmarks.throughput_rows import Row
from benchmarks.throughput_table import Left


def left(name: str, surprise: float) -> Left:
    row = Row(
        source="llm-foundry", name=name, gpu="h100-sxm", group="7b", method="full", family="gpt2", tokens=1.0, rate=1.0,
        at_best=(),
    )  # fmt: skip
    return Left(row=row, surprise=surprise)


def test_a_change_is_the_difference_to_the_fewest_gpus_of_the_same_run() -> None:
    few, many = left("7b, 8 x h100, 2048 x 8", 0.1), left("7b, 64 x h100, 2048 x 8", 0.25)
    other = left("7b, 64 x h100, 4096 x 4", 0.9)
    assert (devices(few.row), devices(many.row)) == (8, 64)
    assert series(few.row) == series(many.row) != series(other.row)
    assert efficiencies([many, other, few]) == {64: [pytest.approx(0.15)]}
