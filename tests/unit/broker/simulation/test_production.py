"""The daemon's decisions over traces: a cheaper zone is worth a move, a small or short difference is not."""

from itertools import pairwise

from broker.simulation.production import ProductionPolicy
from broker.simulation.runs import SimulatedRun, follow
from broker.simulation.traces import Trace

TICKS = 6 * 14


def zone(name: str, prices: list[float], available: list[bool] | None = None) -> Trace:
    return Trace(
        name=name, tick_s=600, available=tuple(available or [True] * TICKS), spot_usd=tuple(prices), on_demand_usd=3.0
    )  # fmt: skip


def finished(*zones: Trace, reviews: bool = True, past: tuple[Trace, ...] = ()) -> SimulatedRun:
    run = SimulatedRun(zones=zones, work_s=10 * 3600, changeover_s=360)
    assert follow(ProductionPolicy(run, reviews=reviews, past=past), run)
    return run


def test_a_job_leaves_dear_spot_for_a_cheap_zone_that_is_back() -> None:
    """The cheap zone returns after an hour, and its price is half."""
    late = zone("cheap", [0.5] * TICKS, [tick >= 6 for tick in range(TICKS)])
    moved, stayed = (finished(zone("dear", [1.0] * TICKS), late, reviews=reviews) for reviews in (True, False))
    assert (moved.starts, stayed.starts) == (2, 1)
    assert moved.usd < 0.8 * stayed.usd


def test_a_small_difference_moves_no_job() -> None:
    late = zone("cheap", [0.97] * TICKS, [tick >= 6 for tick in range(TICKS)])
    assert finished(zone("dear", [1.0] * TICKS), late).starts == 1


def test_prices_that_swing_move_a_job_once_an_hour_at_most() -> None:
    """Each move waits for an hour of training, and the first machine may be bought at any time."""
    low = [0.4 if tick // 2 % 2 else 1.2 for tick in range(TICKS)]
    run = finished(zone("a", low), zone("b", [1.6 - price for price in low]))
    starts = [tick for tick in range(1, len(run.machines)) if run.machines[tick] != run.machines[tick - 1]]
    assert starts
    assert all(later - earlier >= 6 for earlier, later in pairwise(starts))
    assert sum(run.preemptions) == 0


def test_cheap_zones_that_are_sold_out_hide_none_that_is_for_sale() -> None:
    """Twenty cheaper zones are sold out throughout; the job runs on the dearer zone that is for sale."""
    none = [zone(f"z{n}", [0.5] * TICKS, [False] * TICKS) for n in range(20)]
    run = finished(*none, zone("dear", [0.9] * TICKS))
    assert run.spot_s[-1] >= 10 * 3600
    assert run.usd < 10


def test_an_observed_past_counts() -> None:
    """Slack has no better use later in a market that was sold out for days, so more of it goes into the wait."""
    none = zone("a", [0.9] * TICKS, [False] * TICKS)
    past = Trace(name="a", tick_s=600, available=(True,) + (False,) * 1500, spot_usd=(0.9,) * 1501, on_demand_usd=3.0)
    assert finished(none, past=(past,)).waits > finished(none).waits
