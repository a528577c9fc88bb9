"""Tables, bars and plots of a notebook: bounded, escaped and well-formed."""

import math
from xml.etree import ElementTree

import pytest

from broker.reporting.notebook_html import WIDTH, bar_html, plot_svg, table_html, text_html

HOSTILE = '<script>alert("x")</script>\x1b[2J'


def test_texts_of_users_are_escaped() -> None:
    assert "<script" not in text_html(HOSTILE) + table_html([HOSTILE], [[HOSTILE]])
    assert "<script" not in plot_svg(HOSTILE, [(1, 1.0), (2, 2.0)], [(1, HOSTILE)])
    assert "\x1b" not in table_html([HOSTILE], [[HOSTILE]])
    assert table_html(["a"], [["b"]]) == "<table><tr><th>a</th></tr><tr><td>b</td></tr></table>"


@pytest.mark.parametrize(("share", "value"), [(-1.0, "0.000"), (0.25, "0.250"), (7.0, "1.000")])
def test_a_bar_is_bounded(share: float, value: str) -> None:
    assert f'value="{value}"' in bar_html(share)


def points(svg: str) -> list[tuple[float, float]]:
    line = next(node for node in ElementTree.fromstring(svg) if node.tag == "polyline")
    pairs = (pair.split(",") for pair in line.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_a_plot_falls_where_the_loss_falls_and_leaves_gaps_out() -> None:
    svg = plot_svg("loss", [(1, 3.0), (2, None), (3, math.inf), (4, 2.0), (5, 1.0)], [(4, "preempted"), (9, "later")])
    (x1, y1), (x2, y2), (x3, y3) = points(svg)
    assert 0 < x1 < x2 < x3 < WIDTH
    assert y1 < y2 < y3
    assert "preempted" in svg
    assert "later" not in svg
    assert svg.count("<line ") == 1


def test_a_plot_of_equal_or_extreme_values_is_finite() -> None:
    assert points(plot_svg("loss", [(1, 2.0), (1, 2.0)]))[0][1] == points(plot_svg("loss", [(1, 2.0), (2, 2.0)]))[1][1]
    for x, y in points(plot_svg("loss", [(1, -1e308), (2**53, 1e308)])):
        assert math.isfinite(x)
        assert math.isfinite(y)


@pytest.mark.parametrize("values", [[], [(1, 2.0)], [(1, None), (2, math.nan)]])
def test_nothing_is_plotted_without_two_values(values: list[tuple[int, float | None]]) -> None:
    assert plot_svg("loss", values) == ""
