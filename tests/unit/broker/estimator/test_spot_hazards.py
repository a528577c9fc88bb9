"""Hazards of spot markets follow their own history, and unions are up while any part is."""

import pytest

from broker.estimator.spot_hazards import (
    AGES_MIN,
    MAX_FACTOR_STEPS,
    PRIOR_FALL,
    PRIOR_RISE,
    MarketHistory,
    age_class,
    expected_events,
    lifetime_min,
    market,
    market_history,
    rounded_factor,
    scaled,
    union,
)
from tests.support.machines import offer

DAY = 24 * 60.0


def test_market_separates_zones_machines_and_node_counts() -> None:
    here = offer(id="a", spot=True)
    assert market(here, 1) == market(offer(id="b", spot=True), 1)
    assert market(here, 1) != market(here, 4)


def test_age_classes_begin_at_their_first_minute() -> None:
    assert [age_class(age) for age in AGES_MIN] == list(range(len(AGES_MIN)))
    assert age_class(9.9) == 0


def test_frailty_follows_the_events_of_a_market() -> None:
    stable = market_history(((0.0, True),), 3 * DAY)
    often = market_history(tuple((number * 20.0, number % 2 == 0) for number in range(200)), 4000.0)
    assert stable.fall_factor < 1 < often.fall_factor
    assert (stable.is_up, stable.age_min) == (True, 3 * DAY)
    assert (often.is_up, often.age_min) == (False, 20.0)
    assert often.rise_factor > 1
    assert MarketHistory().fall_factor == 1


def test_old_events_weigh_less() -> None:
    fell = MarketHistory(is_up=True, age_min=60.0).after(10.0, is_up=False)
    assert fell.falls == 1
    assert fell.after(5 * DAY, is_up=False).falls == pytest.approx(0.5)


def test_expected_events_sum_the_hazards_of_each_age() -> None:
    assert expected_events(PRIOR_FALL, 0.0, 20.0) == pytest.approx(PRIOR_FALL[0] + PRIOR_FALL[1])
    assert expected_events(PRIOR_RISE, 960.0, 100.0) == pytest.approx(10 * PRIOR_RISE[-1])


def test_lifetimes_grow_with_age_and_shrink_with_the_factor() -> None:
    lives = [lifetime_min(PRIOR_FALL, age) for age in AGES_MIN]
    assert lives == sorted(lives)
    assert lives[-1] == pytest.approx(10 / PRIOR_FALL[-1])
    assert lifetime_min(scaled(PRIOR_FALL, 2.0), 0.0) < lives[0]
    assert max(scaled(PRIOR_FALL, 100.0)) == 0.9


def test_factors_are_rounded_within_limits() -> None:
    assert [rounded_factor(factor) for factor in (1e-6, 1.0, 1.5, 1e6)] == [-MAX_FACTOR_STEPS, 0, 1, MAX_FACTOR_STEPS]


def test_a_union_is_up_while_any_market_is() -> None:
    first = ((0.0, True), (10.0, False), (30.0, True))
    second = ((0.0, False), (10.0, True), (20.0, False))
    assert union((first,)) == first
    assert union((first, second)) == ((0.0, True), (20.0, False), (30.0, True))
