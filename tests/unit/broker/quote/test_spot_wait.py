"""A job with a deadline uses spot, and waits for it, while on-demand can still meet the deadline."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.money import format_usd
from broker.domain.offer import DropReason, Offer, Quote
from broker.domain.workload import Workload
from broker.lifecycle.account_refusals import account_keys
from broker.quote.engine import quote
from broker.quote.placement import Choice, Queue, choose
from broker.simulation.optimum import optimum
from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import SimulatedRun, follow
from broker.simulation.traces import Trace
from tests.support.machines import NOW, SCRIPT, WORK, offer, spec

CAPS = {"cloud": Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60)}
ON_DEMAND = offer(id="cloud/on-demand")
SPOT = offer(id="cloud/spot", spot=True, usd_per_hour=Decimal("0.80"), on_demand_usd_per_hour=Decimal("2.50"))
SOLD_OUT = {SPOT.id: "sold out"}
HOUR = 3600.0


def quoted(
    deadline_s: float | None,
    offers: tuple[Offer, ...] = (ON_DEMAND, SPOT),
    *,
    excluded: Mapping[str, str] | None = None,
    work: Workload = WORK,
    resources: Mapping[str, Any] | None = None,
    caps: Mapping[str, Caps] = CAPS,
    waited_s: float = 0.0,
    measured_step_s: float | None = None,
    **settings: Any,
) -> Quote:
    deadline = {} if deadline_s is None else {"deadline": (NOW + timedelta(seconds=deadline_s)).isoformat()}
    return quote(
        spec(resources=dict(resources or {}), **deadline, **settings), work, offers, now=NOW, local_files=False,
        scoped_store=True, spent=Decimal(0), cap_left=Decimal(100), excluded=excluded or {}, caps=caps,
        waited_s=waited_s, measured_step_s=measured_step_s,
    )  # fmt: skip


def chosen(made: Quote) -> Choice:
    return choose(made, cap_left=Decimal(100), attempt_number=1, min_budget=lambda line: Decimal(0))


STEP_S = quoted(None, (ON_DEMAND,)).lines[0].step_s or 0.0


def test_spot_is_kept_while_on_demand_can_replace_it_in_time() -> None:
    """Preempted twice an hour, spot alone misses the deadline; on-demand after a preemption meets it."""
    often = replace(SPOT, preemptions_per_hour=6.0)
    made = quoted(1.2 * HOUR, (ON_DEMAND, often))
    spot = next(line for line in made.lines if line.offer.spot)
    assert spot.hours_p90 is not None
    assert spot.hours_p90 > 1.2
    assert spot.drop is None
    assert "on demand from" in spot.reason


def test_spot_is_dropped_once_on_demand_could_not_follow_in_time() -> None:
    p90_h = quoted(None, (ON_DEMAND,)).lines[0].hours_p90
    assert p90_h is not None
    often = replace(SPOT, preemptions_per_hour=6.0)
    made = quoted((p90_h + 0.05) * HOUR, (ON_DEMAND, often))
    assert {line.offer.id: line.drop for line in made.lines} == {ON_DEMAND.id: None, often.id: DropReason.DEADLINE}


@pytest.mark.parametrize("excluded", [SOLD_OUT, {}], ids=["refused", "reported sold out"])
def test_a_job_waits_for_cheaper_spot_that_is_sold_out(excluded: Mapping[str, str]) -> None:
    spot = SPOT if excluded else replace(SPOT, available=False)
    made = quoted(6 * HOUR, (ON_DEMAND, spot), excluded=excluded)
    choice = chosen(made)
    assert (choice.line, choice.queue) == (None, Queue.WAIT)
    assert made.spot_outlook is not None
    assert (
        f"waits for spot until {made.spot_outlook.until:%Y-%m-%d %H:%MZ} at the latest, then buys on demand"
        in choice.reason
    )
    assert SPOT.id in choice.reason
    back = chosen(quoted(6 * HOUR))
    assert back.line is not None
    assert back.line.offer.id == SPOT.id


def test_on_demand_is_bought_at_the_latest_start() -> None:
    """The wait ends by the announced time at the latest, and on-demand then meets the deadline by its P90."""
    wait = quoted(6 * HOUR, excluded=SOLD_OUT).spot_outlook
    assert wait is not None
    latest_s = 6 * HOUR - (wait.until - NOW).total_seconds()
    choice = chosen(quoted(latest_s - 1, excluded=SOLD_OUT))
    assert choice.line is not None
    assert choice.line.offer.id == ON_DEMAND.id
    assert choice.line.hours_p90 is not None
    assert choice.line.hours_p90 * HOUR < latest_s - 1


def test_a_choice_names_the_expected_dollars_of_both_ways() -> None:
    made = quoted(6 * HOUR, excluded=SOLD_OUT)
    outlook = made.spot_outlook
    assert outlook is not None
    assert outlook.wait_usd is not None
    assert outlook.demand_usd is not None
    assert outlook.wait_usd < outlook.demand_usd
    assert f"{format_usd(outlook.demand_usd)} on demand now" in chosen(made).reason


def test_a_free_machine_of_ones_own_ends_all_waits() -> None:
    own = {"cloud": replace(CAPS["cloud"], trust="own")}
    free = replace(ON_DEMAND, usd_per_hour=Decimal(0), trust="own")
    made = quoted(6 * HOUR, (free, SPOT), excluded=SOLD_OUT, caps=own)
    assert made.kept_count == 1
    assert made.spot_outlook is None


def test_a_job_without_steps_left_has_nothing_to_plan() -> None:
    """All steps are done and only the results are missing, e.g. after a loss before the final report."""
    made = quoted(6 * HOUR, work=replace(WORK, steps=0, eval_rows=0))
    assert made.kept_count
    assert made.spot_outlook is None


def test_one_offer_represents_each_spot_market() -> None:
    """The cheapest offer on sale in a region is compared in any order of the listing."""
    dearer = replace(SPOT, id="cloud/dearer", usd_per_hour=Decimal("0.90"))
    for spots in ((SPOT, dearer), (dearer, SPOT)):
        made = quoted(6 * HOUR, (ON_DEMAND, *spots))
        assert made.spot_outlook is not None
        assert (made.spot_outlook.offer_id, made.spot_outlook.action) == (SPOT.id, "spot")


@pytest.mark.parametrize("objective", ["fastest", "balanced"])
def test_other_objectives_never_wait(objective: str) -> None:
    assert quoted(6 * HOUR, excluded=SOLD_OUT, resources={"objective": objective}).spot_outlook is None


def test_a_measured_speed_widens_the_slack() -> None:
    """A job that has measured the estimated speed needs less reserve than one whose speed is only estimated."""
    estimated, measured = quoted(6 * HOUR), quoted(6 * HOUR, measured_step_s=STEP_S)
    slower = quoted(6 * HOUR, measured_step_s=2 * STEP_S)
    assert estimated.spot_outlook is not None
    assert measured.spot_outlook is not None
    assert slower.spot_outlook is not None
    assert measured.spot_outlook.until > estimated.spot_outlook.until
    assert slower.spot_outlook.until == estimated.spot_outlook.until


def test_without_a_deadline_a_job_waits_as_long_as_spot_saves() -> None:
    """The wait costs `hour_worth_usd` an hour; it ends when it has cost the saving, counted from the submit."""
    found = {line.offer.id: line.usd_p50 for line in quoted(None).lines}
    on_demand, spot = found[ON_DEMAND.id], found[SPOT.id]
    assert on_demand is not None
    assert spot is not None
    limit_s = float((on_demand - spot) / Decimal("0.5")) * HOUR
    assert limit_s > 700
    for waited_s in (0.0, limit_s - 60):
        choice = chosen(quoted(None, excluded=SOLD_OUT, hour_worth_usd="0.5", waited_s=waited_s))
        assert (choice.line, choice.queue) == (None, Queue.WAIT)
        assert f"waits for spot until {NOW + timedelta(seconds=limit_s - waited_s):%Y-%m-%d %H:%MZ}" in choice.reason
        assert "an hour of delay is worth $0.50" in choice.reason
    after = chosen(quoted(None, excluded=SOLD_OUT, hour_worth_usd="0.5", waited_s=limit_s + 1)).line
    assert after is not None
    assert after.offer.id == ON_DEMAND.id
    bought = chosen(quoted(None, hour_worth_usd="0.5")).line
    assert bought is not None
    assert bought.offer.id == SPOT.id


def test_delay_that_is_worth_nothing_waits_without_limit() -> None:
    choice = chosen(quoted(None, excluded=SOLD_OUT, hour_worth_usd="0", waited_s=1e7))
    assert (choice.line, choice.queue) == (None, Queue.WAIT)
    assert "hour_worth_usd sets no limit" in choice.reason


def test_a_deadline_overrules_what_an_hour_is_worth() -> None:
    choice = chosen(quoted(0.4 * HOUR, excluded=SOLD_OUT, hour_worth_usd="0"))
    assert choice.line is not None
    assert choice.line.offer.id == ON_DEMAND.id


@pytest.mark.parametrize(
    "made",
    [
        quoted(None, excluded=SOLD_OUT),
        quoted(None, excluded=SOLD_OUT, hour_worth_usd="0", resources={"objective": "fastest"}),
        quoted(None, excluded=SOLD_OUT, hour_worth_usd="0", work=SCRIPT),
        quoted(None, excluded=dict.fromkeys(account_keys(SPOT), "quota"), hour_worth_usd="0"),
        quoted(None, (ON_DEMAND, replace(SPOT, usd_per_hour=Decimal("2.45"))), excluded=SOLD_OUT, hour_worth_usd="0"),
        quoted(6 * HOUR, excluded=dict.fromkeys(account_keys(SPOT), "quota")),
        quoted(6 * HOUR, (ON_DEMAND, replace(SPOT, usd_per_hour=Decimal("2.45"))), excluded=SOLD_OUT),
        quoted(6 * HOUR, excluded=SOLD_OUT, resources={"spot": "never"}),
        quoted(6 * HOUR, excluded=SOLD_OUT, work=SCRIPT),
        quoted(6 * HOUR, (SPOT,), excluded=SOLD_OUT),
        quoted(0.4 * HOUR, excluded=SOLD_OUT),
    ],
    ids=[
        "saves less than a delay",
        "fastest",
        "a script without deadline",
        "account without deadline",
        "hardly cheaper without deadline",
        "account",
        "hardly cheaper",
        "never spot",
        "a script",
        "no on-demand",
        "no time",
    ],
)
def test_no_job_waits_in_vain(made: Quote) -> None:
    assert "waits for spot" not in chosen(made).reason


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 24)), min_size=1, max_size=30), st.sampled_from([1.2, 1.5, 2.0])
)
def test_no_market_makes_a_job_late(spells: list[tuple[bool, int]], slack: float) -> None:
    """A job ends in time with any availability of spot, and costs no more than on-demand throughout."""
    ticks = int(10 * slack * 6)
    available = [is_up for is_up, length in spells for _ in range(length)]
    available = (available * ticks)[:ticks]
    trace = Trace(name="drawn", tick_s=600, available=tuple(available), spot_usd=(0.8,) * ticks, on_demand_usd=2.5)
    run = SimulatedRun(zones=[trace], work_s=36_000, changeover_s=360)
    assert follow(ProductionPolicy(run), run)
    assert run.usd <= 2.5 * 10.1 + run.starts * 0.8 / 6
    assert run.usd >= optimum([trace], 36_000, 360).usd - 0.01
