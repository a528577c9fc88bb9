"""The save interval minimises the expected waste, and never exceeds the work that may be lost."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.upload.save_interval import SaveInterval
from trainer.contract.save_interval import daly_s, interval_message, interval_s
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import RunFolder

costs = st.floats(0.001, 600)
losses = st.floats(0, 100)
mosts = st.floats(1, 86_400)


def expected_waste(interval: float, cost: float, per_hour: float) -> float:
    """Return the wasted share of the time: all saves, and for every loss half an interval with its save."""
    return cost / interval + (interval + cost) / 2 * per_hour / 3600


def test_the_save_interval_is_dalys_estimate() -> None:
    mean_s = 3600 / 0.5
    exact = math.sqrt(2 * 10 * mean_s) * (1 + math.sqrt(10 / (2 * mean_s)) / 3 + 10 / (2 * mean_s) / 9) - 10
    assert daly_s(10, 0.5) == pytest.approx(exact)
    assert daly_s(0.01, 0.5) == pytest.approx(math.sqrt(2 * 0.01 * mean_s), rel=0.01)
    assert daly_s(10, 0) == math.inf
    assert daly_s(2 * mean_s, 0.5) == mean_s


@given(st.floats(0.001, 30), st.floats(0.001, 1))
def test_no_other_interval_wastes_much_less(cost: float, per_hour: float) -> None:
    best = expected_waste(daly_s(cost, per_hour), cost, per_hour)
    others = (daly_s(cost, per_hour) * factor for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert all(best <= expected_waste(other, cost, per_hour) * 1.02 for other in others)


@given(costs, losses, mosts)
def test_the_save_interval_bounds_lost_work_and_save_cost(cost: float, per_hour: float, most: float) -> None:
    config = CheckpointConfig(every_s=most)
    chosen = interval_s(cost, per_hour, most)
    assert config.min_interval_s <= chosen <= most
    assert chosen + cost <= most * (1 + 1e-9) or chosen == pytest.approx(min(most, max(cost, config.min_interval_s)))


def test_the_message_explains_the_save_interval() -> None:
    spot = interval_message(1.0, 0.27, CheckpointConfig())
    assert spot.startswith("saves every 163 s, as a save takes 1.00 s and a loss is expected every 3.7 h (Daly: 163 s)")
    assert interval_message(2.0, 0, CheckpointConfig()) == (
        "saves every 298 s, as a save takes 2.00 s; at most 300 s of work may be lost"
    )
    assert "up to 80 s may be lost, more than the 60 s of checkpoint.every_s" in interval_message(
        40.0, 0, CheckpointConfig(every_s=60)
    )


def test_the_worker_gets_the_save_interval_and_users_one_message(tmp_path: Path) -> None:
    run, heard = RunFolder(root=tmp_path / "run"), list[str]()
    run.make()
    pace = SaveInterval(
        run, config=CheckpointConfig(), losses_per_hour=0.27, report=lambda kind, message: heard.append(message)
    )
    assert pace.every_s == 300
    for cost_s in (1.0, 1.1, 0.9):
        pace.saved(cost_s)
    assert float(run.interval.read_text()) == pytest.approx(pace.every_s, abs=1e-3)
    assert pace.every_s == pytest.approx(daly_s(1.0, 0.27))
    assert len(heard) == 1
    pace.saved(30.0)
    assert len(heard) == 2
