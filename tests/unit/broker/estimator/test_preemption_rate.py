"""Own history corrects the preemption rate that a cloud states, or an unknown rate."""

import random
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.offer import DropReason, Offer, QuoteLine
from broker.domain.workload import SpotHours, Workload
from broker.estimator.planning.corrections import Corrections
from broker.estimator.planning.fit import Fit
from broker.estimator.preemption_rate import (
    ASSUMED_PER_HOUR,
    FAILURES_PER_GPU_HOUR,
    STRENGTH,
    basis,
    certainty,
    expected_per_hour,
    losses_per_hour,
    place_of,
    place_of_offer,
    preemptions_per_s,
)
from broker.quote.engine import quote
from broker.quote.machine_cost import HostDemands, MachineCost, kind_of
from tests.support.build import T0, offer, spec
from trainer.contract.save_interval import interval_s

rates = st.none() | st.floats(0, 20)
hours = st.floats(0, 1e5)
counts = st.integers(0, 1000)


def seen(hours: float, preemptions: int, **where: str) -> SpotHours:
    values = {"provider": "simulated", "cloud": "runpod", "region": "eu", "accelerator": "l40s"} | where
    return SpotHours(**values, hours=hours, preemptions=preemptions)


def test_history_of_an_offer_is_found_by_the_place_of_both() -> None:
    sold = offer(region="us", accelerator="a100")
    there = seen(1, 0, provider=sold.provider, cloud=sold.cloud, region="us", accelerator="a100")
    assert place_of(there) == place_of_offer(sold)
    assert place_of(replace(there, region="eu")) != place_of_offer(sold)


@given(rates, hours, counts)
def test_the_rate_lies_between_the_stated_and_the_observed_one(stated: float | None, hours: float, n: int) -> None:
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


def test_on_demand_is_never_preempted_in_estimates() -> None:
    steady = offer(spot=False)
    assert preemptions_per_s(steady, {place_of_offer(steady): seen(1, 9)}) == 0.0
    assert basis(steady, {}) == ""


def of(one: Offer, history: SpotHours | None) -> QuoteLine:
    work = Workload(shape=None, method="script", steps=100)
    corrections = Corrections(spots={} if history is None else {place_of_offer(one): history})
    made = quote(
        spec(), work, [one], now=T0, local_files=False, scoped_store=True, spent=Decimal(0),
        cap_left=Decimal(100), excluded={}, caps={}, learned=corrections,
    )  # fmt: skip
    (line,) = made.lines
    return line


def test_a_quote_states_the_expected_preemptions_and_their_source() -> None:
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
    assert gone.drop is DropReason.PREEMPTED_TOO_OFTEN


def test_all_machines_of_an_attempt_are_lost_together() -> None:
    one, spot = losses_per_hour(offer(gpus=8, spot=False), {}, 1), offer(gpus=8, spot=True, preemptions_per_hour=0.5)
    assert one == pytest.approx(8 * FAILURES_PER_GPU_HOUR)
    assert losses_per_hour(offer(gpus=8, spot=False), {}, 3) == pytest.approx(3 * one)
    assert losses_per_hour(spot, {}, 2) == pytest.approx(2 * (0.5 + one))
    assert losses_per_hour(offer(gpus=0, spot=False), {}, 1) == FAILURES_PER_GPU_HOUR


def test_certainty_of_a_rate_grows_with_observed_preemptions() -> None:
    one = offer()
    assert certainty(one, {}) == 1.0, "the cloud's word weighs as one preemption"
    assert certainty(one, {place_of_offer(one): seen(90, 9)}) == 10.0
    assert certainty(offer(spot=False), {place_of_offer(one): seen(90, 9)}) == 1.0


def kind(setup: float = 300.0, work: float = 36_000.0) -> MachineCost:
    """Return the cost of a script, for which only the cost of a preemption is known."""
    work_of = Workload(shape=None, method="script")
    made = kind_of(
        work_of, offer(), Fit(drop=None, reason=""), Caps(spot=True, boot_s=setup), (None, ""), nodes=1,
        storage_usd_per_gib_month=0.0, demands=HostDemands(),
    )  # fmt: skip
    return replace(made, work=work)


@given(st.floats(0, 5000), st.floats(1, 86_400), st.floats(0, 1), st.floats(0, 1))
def test_a_quote_counts_on_the_interval_that_the_trainer_will_choose(
    saving: float, most: float, per_s: float, failures: float
) -> None:
    one = replace(kind(), saving=saving, max_lost_work_s=most, failures=failures)
    chosen = interval_s(saving, 3600 * per_s + failures, most) if saving else most
    assert one.every(per_s) == pytest.approx(max(saving, chosen))


rates_of = st.floats(0, 2)
certainties = st.floats(1, 1000)


@given(rates_of, certainties, st.floats(60, 900), st.floats(0, 1e6))
def test_the_p90_is_no_less_than_the_median_and_narrows_with_what_is_known(
    per_hour: float, known: float, setup: float, work: float
) -> None:
    one, rate = kind(setup, work), per_hour / 3600
    vague, sure = one.p90(rate, 1.0), one.p90(rate, known)
    assert vague >= sure * (1 - 1e-12)
    assert sure >= one.p50(rate) * (1 - 1e-12)
    assert one.p90(rate * 1.01, known) >= sure * (1 - 1e-12), "a worse market never gives an earlier end"


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 50), st.integers(0, 50))
def test_adverse_history_never_narrows_p90_below_a_better_market(one: float, other: float, few: int, many: int) -> None:

    def p90(history: SpotHours) -> float | None:
        at, rate = {place_of_offer(offer()): history}, preemptions_per_s(offer(), {place_of_offer(offer()): history})
        return kind().p90(rate, certainty(offer(), at)) if rate * kind().lost(rate) < 1 else None

    better, worse = p90(seen(max(one, other), min(few, many))), p90(seen(min(one, other), max(few, many)))
    assert better is None or worse is None or worse >= better * (1 - 1e-12)


@pytest.mark.parametrize(("hours", "preemptions"), [(0.0, 0), (8.0, 3), (100.0, 30)])
def test_p90_holds_for_nine_of_ten_runs_of_the_known_rate(hours: float, preemptions: int) -> None:
    """No spread but that of preemptions: of their number and of their rate, 3,000 runs."""
    dice, one = random.Random(17), kind()
    known, prior = STRENGTH + preemptions, STRENGTH / 0.3 + hours
    rate = expected_per_hour(0.3, seen(hours, preemptions)) / 3600
    assert rate * 3600 == pytest.approx(known / prior)
    limit = one.p90(rate, known) - one.setup * 0.5  # less what it adds to the set-up
    kept = 0
    for _ in range(3000):
        drawn = dice.gammavariate(known, 1 / prior) / 3600
        left, took = one.work * (1 + one.stall / one.every(rate)), one.setup
        while drawn > 0 and (gap := dice.expovariate(drawn)) < left and took < limit:
            left, took = left - gap + one.lost(rate), took + gap
        kept += took + left <= limit
    assert 0.87 <= kept / 3000 <= 0.93
