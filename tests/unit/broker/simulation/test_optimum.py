"""The optimum is the cheapest of all runs, and its plan costs what it says."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.simulation.baselines import greedy, on_demand, uniform_progress
from broker.simulation.optimum import optimum
from broker.simulation.runs import SimulatedMachine, SimulatedRun, follow
from broker.simulation.traces import Trace

TICKS = 5
MACHINES = (None, SimulatedMachine("on-demand"), SimulatedMachine("spot"), SimulatedMachine("spot", 1))


def zone(available: list[bool], prices: list[float], on_demand_usd: float = 3.0, name: str = "a") -> Trace:
    return Trace(
        name=name, tick_s=600, available=tuple(available), spot_usd=tuple(prices), on_demand_usd=on_demand_usd
    )  # fmt: skip


def cost(zones: list[Trace], machines: tuple[SimulatedMachine | None, ...]) -> float:
    """Return the dollars of a fixed schedule, infinite if it cannot run or does not finish."""
    run = SimulatedRun(zones=zones, work_s=1800, changeover_s=120)
    for machine in machines:
        run.lose_machine()
        if machine and machine.market == "spot" and not zones[machine.zone].available[run.tick]:
            return float("inf")
        if run.advance(machine):
            return run.usd
    return float("inf")


ZONE = st.tuples(
    st.lists(st.booleans(), min_size=TICKS, max_size=TICKS),
    st.lists(st.sampled_from((0.5, 1.0, 2.0, 4.0)), min_size=TICKS, max_size=TICKS),
)


@settings(deadline=None, max_examples=8)
@given(ZONE, ZONE)
def test_no_schedule_is_cheaper(one: tuple[list[bool], list[float]], other: tuple[list[bool], list[float]]) -> None:
    """All schedules of five ticks in two zones are compared."""
    zones = [zone(*one), zone(*other, on_demand_usd=3.5, name="b")]
    best = optimum(zones, 1800, 120, plan=True)
    cheapest = min(cost(zones, machines) for machines in product(MACHINES, repeat=TICKS))
    assert best.usd == pytest.approx(cheapest)
    planned = best.machines + (None,) * (TICKS - len(best.machines))
    assert cost(zones, planned) == pytest.approx(cheapest)


def test_work_that_cannot_end_in_time_has_no_plan() -> None:
    best = optimum([zone([True] * TICKS, [1.0] * TICKS)], 3600, 120, plan=True)
    assert best.usd == float("inf")
    assert best.machines == ()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.booleans(), min_size=60, max_size=60), min_size=1, max_size=2))
def test_a_baseline_finishes_in_time_and_not_below_the_optimum(available: list[list[bool]]) -> None:
    zones = [zone(a, [1.0 + n] * 60, name=str(n)) for n, a in enumerate(available)]
    best = optimum(zones, 24_000, 360).usd
    for decide in (on_demand, greedy, uniform_progress):
        run = SimulatedRun(zones=zones, work_s=24_000, changeover_s=360)
        assert follow(decide, run)
        assert run.usd >= best - 0.01
        assert len(run.machines) == run.tick


def test_sold_out_spot_cannot_be_bought() -> None:
    run = SimulatedRun(zones=[zone([False], [1.0])], work_s=60, changeover_s=0)
    with pytest.raises(ValueError, match="no spot at tick 0"):
        follow(lambda run: SimulatedMachine("spot"), run)
