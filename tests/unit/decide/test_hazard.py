"""Own history corrects what a cloud says, or nobody knows, of preemptions."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.decide.experience import Experience
from broker.decide.hazard import (
    ASSUMED_PER_HOUR,
    FAILURES_PER_GPU_HOUR,
    basis,
    expected_per_hour,
    losses_per_hour,
    place,
    preemptions_per_s,
)
from broker.decide.quote import quote
from broker.domain.observation import SpotHours
from broker.domain.offer import Drop, Offer, QuoteLine, Workload
from tests.unit.decide.build import T0, offer, spec

rates = st.none() | st.floats(0, 20)
hours = st.floats(0, 1e5)
counts = st.integers(0, 1000)


def seen(hours: float, preemptions: int, **where: str) -> SpotHours:
    values = {"provider": "simulated", "cloud": "runpod", "region": "eu", "accelerator": "l40s"} | where
    return SpotHours(**values, hours=hours, preemptions=preemptions)


@given(rates, hours, counts)
def test_it_lies_between_what_is_stated_and_what_was_seen(stated: float | None, hours: float, n: int) -> None:
    prior = ASSUMED_PER_HOUR if stated is None else stated
    expected = expected_per_hour(stated, seen(hours, n))
    observed = n / hours if hours else float("inf")
    most = max(prior, 1e-3, observed) if n else prior
    assert min(prior, observed) * (1 - 1e-9) <= expected <= most * (1 + 1e-9) or (n and not hours)


@given(rates, hours, hours, counts, counts)
def test_more_preemptions_in_less_time_never_speak_for_a_market(
    stated: float | None, one: float, other: float, few: int, many: int
) -> None:
    worse = seen(min(one, other), max(few, many))
    better = seen(max(one, other), min(few, many))
    assert expected_per_hour(stated, worse) >= expected_per_hour(stated, better) * (1 - 1e-12)


def test_much_history_is_believed_and_little_moves_little() -> None:
    assert expected_per_hour(1.0, seen(1000, 10)) == pytest.approx(0.011, abs=1e-4)
    assert expected_per_hour(0.1, seen(0.5, 0)) == pytest.approx(0.095, abs=1e-3)
    assert expected_per_hour(0.0, seen(10, 0)) == 0.0
    assert expected_per_hour(0.0, seen(10, 5)) > 0
    assert expected_per_hour(0.3, None) == 0.3


def test_on_demand_is_not_preempted_whatever_was_seen() -> None:
    steady = offer(spot=False)
    assert preemptions_per_s(steady, {place(steady): seen(1, 9)}) == 0.0
    assert basis(steady, {}) == ""


def of(one: Offer, history: SpotHours | None) -> QuoteLine:
    work = Workload(shape=None, method="script", steps=100)
    known = Experience(spots={} if history is None else {place(one): history})
    made = quote(
        spec(), work, [one], now=T0, local_files=False, scoped_store=True, spent=Decimal(0),
        cap_left=Decimal(100), excluded={}, caps={}, learned=known,
    )  # fmt: skip
    (line,) = made.lines
    return line


def test_a_quote_says_what_is_expected_and_by_what() -> None:
    assert "one in 3.7 h assumed" in of(offer(), None).reason
    assert "preempt" not in of(offer(preemptions_per_hour=0.1), None).reason
    reason = of(offer(preemptions_per_hour=0.1), seen(90, 9)).reason
    own = "9 in 90 h of own l40s spot machines there, where the cloud says one in 10.0 h"
    assert f"; preemptions: one in 10.0 h expected by {own};" in reason
    assert "where one in 3.7 h assumed" in of(offer(), seen(90, 9)).reason
    assert "none expected by 0 in 3 h" in of(offer(preemptions_per_hour=0.0), seen(3, 0)).reason


def test_a_market_that_keeps_taking_machines_away_is_not_bought_again() -> None:
    assert of(offer(preemptions_per_hour=0.01), None).drop is None
    assert of(offer(preemptions_per_hour=0.01), seen(1, 60)).drop is None  # 0.6 an hour
    gone = of(offer(preemptions_per_hour=5.0), seen(3, 100))
    assert gone.drop is Drop.PREEMPTED_TOO_OFTEN


def test_all_machines_of_an_attempt_are_lost_together() -> None:
    one, spot = losses_per_hour(offer(gpus=8, spot=False), {}, 1), offer(gpus=8, spot=True, preemptions_per_hour=0.5)
    assert one == pytest.approx(8 * FAILURES_PER_GPU_HOUR)
    assert losses_per_hour(offer(gpus=8, spot=False), {}, 3) == pytest.approx(3 * one)
    assert losses_per_hour(spot, {}, 2) == pytest.approx(2 * (0.5 + one))
    assert losses_per_hour(offer(gpus=0, spot=False), {}, 1) == FAILURES_PER_GPU_HOUR
