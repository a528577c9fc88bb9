"""Bids stay between the floor and on-demand, and grow with what a restart costs."""

from decimal import Decimal
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.common.market_rules import bid

prices = st.decimals(min_value="0.05", max_value="100", places=3)
restarts = st.floats(min_value=0, max_value=86_400)


def test_cheap_restart_adds_nothing() -> None:
    assert bid(Decimal("0.300"), Decimal("0.690"), restart_s=60) == Decimal("0.300")


def test_a_costly_restart_raises_the_margin_of_the_bid() -> None:
    # 0.05 log(1800 / 3600 / 0.05) = 0.1151
    assert bid(Decimal("1.000"), Decimal("2.000"), restart_s=1800) == Decimal("1.116")


def test_the_margin_of_the_bid_has_the_least_cost() -> None:
    """The closed form against a search over the cost that it is derived from."""

    def cost(h: float) -> float:
        return 1 + h + exp(-h / 0.05) * 1800 / 3600

    best = min((n / 10_000 for n in range(5000)), key=cost)
    assert float(bid(Decimal("1000"), None, restart_s=1800)) / 1000 - 1 == pytest.approx(best, abs=1e-3)


def test_never_above_on_demand() -> None:
    assert bid(Decimal("0.68"), Decimal("0.69"), restart_s=7200) == Decimal("0.69")


@given(prices, prices, restarts, restarts)
def test_a_bid_is_within_bounds_and_grows_with_the_restart(
    one: Decimal, other: Decimal, restart_s: float, more_s: float
) -> None:
    floor, on_demand = sorted((one, other))
    offered = bid(floor, on_demand, restart_s)
    assert floor <= offered <= on_demand
    assert bid(floor, on_demand, restart_s + more_s) >= offered
    assert bid(floor, None, restart_s) <= floor * Decimal("1.4") + Decimal("0.001")
