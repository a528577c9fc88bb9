"""The loss curve in the terminal."""

from math import inf, nan

from broker.cli.core.plots import in_terminal


def test_a_diverged_loss_is_left_out_of_the_curve() -> None:
    plot = in_terminal(((1, 4.0), (2, nan), (3, inf), (4, 2.0)), colour=False)
    assert plot == in_terminal(((1, 4.0), (4, 2.0)), colour=False)
    assert "loss by optimizer step" in plot


def test_the_curve_is_plain_text_of_80_columns_without_colour() -> None:
    curve = ((1, 4.0), (2, 3.0), (3, 2.5))
    plain, coloured = (in_terminal(curve, colour=colour) for colour in (False, True))
    assert [len(line) for line in plain.splitlines()] == [80] * 15
    assert "\x1b" not in plain
    assert "\x1b[38;5;12m" in coloured
