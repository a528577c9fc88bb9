"""Intervals are calibrated over groups and judged by groups that they were calibrated without."""

import math

import pytest

from benchmarks.external_rows import EXTERNAL, Answered, read
from benchmarks.external_throughput import compare, grouped_errors
from benchmarks.throughput_groups import (
    FITTED_GROUP,
    GroupedError,
    group_of,
    group_widths,
    quantile_over_groups,
    unseen_groups,
)
from broker.estimator.speed.calibration import SPREAD_OTHER_CODE, SPREAD_OTHER_CODE_FAR


def row(group: str, factor: float, *, near: bool = True, least: float = 1.0) -> GroupedError:
    return GroupedError(group=group, near=near, error=math.log(factor), least=least)


def test_a_group_of_many_rows_weighs_as_much_as_a_group_of_one() -> None:
    rows = [row("many", 1.1)] * 98 + [row("one", 2.0)]
    assert quantile_over_groups(rows) == math.log(2.0)
    assert quantile_over_groups(rows, 0.5) == math.log(1.1)


def test_a_group_is_judged_by_the_widths_of_the_others() -> None:
    judged = unseen_groups([row("a", 1.2), row("b", 1.5), row("b", 1.1, near=False, least=3.0)])
    assert judged["a"] == {"n": 1, "coverage_90": 1.0, "median_width": 1.5}
    assert judged["b"] == {"n": 2, "coverage_90": 0.5, "median_width": 2.1}
    assert (judged["all"]["n"], judged["all"]["coverage_90"]) == (3, 0.667)


def test_the_group_of_the_fit_calibrates_nothing_but_is_judged() -> None:
    assert group_of("fms 4.44.2") == group_of("fms 4.39.3") == FITTED_GROUP != group_of("fms Llama-3-8B foak")
    assert group_widths([row(FITTED_GROUP, 5.0)]) is None
    judged = unseen_groups([row(FITTED_GROUP, 5.0), row("a", 1.2)])
    assert set(judged) == {FITTED_GROUP, "all"}, "a has no other group that calibrates"
    assert judged[FITTED_GROUP]["coverage_90"] == 0.0


def test_near_evidence_never_has_the_wider_interval() -> None:
    widths = group_widths([row("a", 3.0), row("b", 1.2, near=False), row("c", 1.3, near=False)])
    assert widths is not None
    assert widths.near <= widths.far
    only_far = group_widths([row("b", 1.2, near=False)])
    assert only_far is not None
    assert only_far.near == pytest.approx(only_far.far)


def test_the_shipped_widths_are_those_of_this_repositorys_rows() -> None:
    answered = [compare(row) for row in read(EXTERNAL / "external_throughput.csv")]
    errors = grouped_errors([row for row in answered if isinstance(row, Answered)])
    widths = group_widths(errors)
    assert widths is not None
    assert (round(widths.near, 3), round(widths.far, 3)) == (SPREAD_OTHER_CODE, SPREAD_OTHER_CODE_FAR)
    assert 0.85 <= unseen_groups(errors)["all"]["coverage_90"] <= 0.95
