"""Metrics files come from rented machines: any content gives a curve or nothing."""

import math
import sys

from hypothesis import given
from hypothesis import strategies as st

from broker.reporting.loss_curve import BARS, losses, sparkline


def test_reads_what_has_step_and_loss_and_prefers_the_later_line() -> None:
    raw = b'{"step": 2, "loss": 3.5}\n{"step": 1, "loss": 4}\nnot json\n{"step": 2, "loss": 3.0}\n{"loss": 1}\n[1]\n'
    assert losses(raw) == ((1, 4.0), (2, 3.0))


def test_a_falling_loss_is_a_falling_line() -> None:
    assert sparkline(tuple((i, 8.0 - i) for i in range(8))) == BARS[::-1]
    assert sparkline(tuple((i, 8.0 - i // 10) for i in range(80)), width=8) == BARS[::-1]


def test_nothing_finite_is_nothing() -> None:
    assert sparkline(()) == ""
    assert sparkline(((1, math.nan), (2, math.inf))) == ""


def test_the_widest_way_between_two_losses_is_a_line() -> None:
    most = sys.float_info.max
    assert sparkline(((1, most), (2, 0.0), (3, -most))) == BARS[-1] + BARS[4] + BARS[0]


@given(raw=st.binary(max_size=400))
def test_any_metrics_file_gives_a_valid_curve(raw: bytes) -> None:
    assert set(sparkline(losses(raw))) <= set(BARS)


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True)), width=st.integers(1, 60))
def test_never_longer_than_asked(values: list[float], width: int) -> None:
    line = sparkline(tuple(enumerate(values)), width)
    assert len(line) <= width
    assert bool(line) == any(map(math.isfinite, values))
