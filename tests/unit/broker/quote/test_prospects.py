"""The quote states cost, end and chance of the chosen policy next to on-demand only."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.quote.prospects import prospects
from tests.support.machines import NOW, SCRIPT
from tests.unit.broker.quote.test_spot_wait import HOUR, ON_DEMAND, SOLD_OUT, SPOT, quoted


def test_spot_is_compared_with_on_demand() -> None:
    made = quoted(6 * HOUR)
    found = prospects(made)
    assert found.chosen is not None
    assert found.on_demand is not None
    assert (found.chosen.action, found.chosen.market, found.chosen.offer_id) == ("buy", "spot", SPOT.id)
    assert (found.on_demand.action, found.on_demand.market) == ("buy", "on-demand")
    assert found.chosen.usd_p10 < found.chosen.usd_p50 < found.chosen.usd_p90
    assert found.chosen.usd_p50 < found.on_demand.usd_p50
    assert found.on_demand.finish_p50 is not None
    assert found.on_demand.finish_p90 is not None
    assert NOW < found.on_demand.finish_p50 < found.on_demand.finish_p90 < NOW + timedelta(hours=6)
    assert found.on_demand.deadline_chance is not None
    assert found.on_demand.deadline_chance > 0.99
    assert found.chosen.deadline_chance is not None
    assert found.chosen.deadline_chance >= 0.9
    latest = made.latest_on_demand_start
    assert latest is not None
    assert latest + (found.on_demand.finish_p90 - NOW) == pytest.approx(
        NOW + timedelta(hours=6), abs=timedelta(seconds=1)
    )


def test_the_chance_falls_with_the_deadline_and_is_one_half_at_p50() -> None:
    line = quoted(None, (ON_DEMAND,)).lines[0]
    assert line.hours_p50 is not None
    assert line.hours_p90 is not None
    chances = []
    for hours in (line.hours_p50 * 1.0001, (line.hours_p50 + line.hours_p90) / 2, line.hours_p90, 10.0):
        on_demand = prospects(replace(quoted(None, (ON_DEMAND,)), deadline=NOW + timedelta(hours=hours))).on_demand
        assert on_demand is not None
        chances.append(on_demand.deadline_chance)
    assert chances == sorted(chances, key=lambda chance: chance or 0)
    assert chances[0] == pytest.approx(0.5, abs=0.01)
    assert chances[2] == pytest.approx(0.9, abs=0.001)
    past = prospects(replace(quoted(None, (ON_DEMAND,)), deadline=NOW)).on_demand
    assert past is not None
    assert past.deadline_chance == 0


@pytest.mark.parametrize("deadline_s", [6 * HOUR, None])
def test_a_wait_ends_on_demand_at_the_latest(deadline_s: float | None) -> None:
    work: dict[str, Any] = {} if deadline_s else {"hour_worth_usd": "0.5"}
    found = prospects(quoted(deadline_s, excluded=SOLD_OUT, **work))
    assert found.chosen is not None
    assert found.on_demand is not None
    assert (found.chosen.action, found.chosen.market, found.chosen.offer_id) == ("wait", "spot", SPOT.id)
    assert "waits for spot until" in found.chosen.reason
    assert found.chosen.usd_p10 < found.chosen.usd_p50 < found.on_demand.usd_p50
    assert found.chosen.usd_p90 == found.on_demand.usd_p90
    assert found.chosen.finish_p50 is not None
    assert found.on_demand.finish_p50 is not None
    assert found.chosen.finish_p50 > found.on_demand.finish_p50
    assert (found.chosen.deadline_chance is None) == (deadline_s is None)


def test_a_wait_without_a_limit_has_no_end() -> None:
    chosen = prospects(quoted(None, excluded=SOLD_OUT, hour_worth_usd="0")).chosen
    assert chosen is not None
    assert (chosen.action, chosen.finish_p50, chosen.finish_p90) == ("wait", None, None)


def test_without_an_estimate_nothing_is_stated() -> None:
    script = prospects(quoted(6 * HOUR, work=SCRIPT))
    assert (script.chosen, script.on_demand) == (None, None)
    only = prospects(quoted(None, (SPOT,)))
    assert only.chosen is not None
    assert only.on_demand is None
    assert prospects(quoted(None, (SPOT,), excluded=SOLD_OUT)).chosen is None
    assert prospects(quoted(None, (replace(ON_DEMAND, usd_per_hour=Decimal(0)),))).chosen is None


def test_a_deadline_that_only_the_median_meets_has_no_fallback() -> None:
    line = quoted(None, (ON_DEMAND,)).lines[0]
    assert line.hours_p50 is not None
    made = quoted(line.hours_p50 * HOUR * 1.15)
    chosen = prospects(made).chosen
    assert made.deadline_at_risk
    assert chosen is not None
    assert chosen.deadline_chance is not None
    assert 0.4 < chosen.deadline_chance < 0.9
