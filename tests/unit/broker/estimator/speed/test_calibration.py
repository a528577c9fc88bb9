"""Observed runs correct the estimate by their weight; a single outlier changes the estimate little."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.estimator.speed.calibration import CPU_PRIOR, GPU_PRIOR, NO_RUNS, Path, Prior, believe

HERE = ("l40s", "lora", "llama")
OTHERS: tuple[Path, ...] = (("l40s", "lora", "qwen2"), ("l40s", "full", "llama"), ("a100-40gb", "lora", "llama"))
LOGS = st.floats(-0.2, 0.2)


def shift(*logs: float, path: Path = HERE, prior: Prior = GPU_PRIOR) -> float:
    return believe([(HERE, y) for y in logs], path, prior).shift


def test_without_a_run_nothing_changes() -> None:
    assert believe([], HERE, GPU_PRIOR) is NO_RUNS
    assert believe([(OTHERS[2], 0.3)], HERE, GPU_PRIOR) is NO_RUNS  # another GPU's


def test_one_run_weighs_as_much_as_its_variance_is_shared() -> None:
    """Posterior of one small deviation by hand: v / (v + s^2), with s^2 times 4 / 5 because of Student's t."""
    shared = sum(level**2 for level in GPU_PRIOR.levels)
    tiny = 1e-6
    assert shift(tiny) / tiny == pytest.approx(shared / (shared + GPU_PRIOR.run**2 * 4 / 5), rel=1e-3)
    of_gpu = GPU_PRIOR.levels[0] ** 2 / (shared + GPU_PRIOR.run**2 * 4 / 5)
    assert shift(tiny, path=("l40s", "full", "gemma")) / tiny == pytest.approx(of_gpu, rel=1e-3)


def test_similar_runs_weigh_more() -> None:
    same, family, method = (believe([(HERE, 0.1)], path, GPU_PRIOR) for path in (HERE, *OTHERS[:2]))
    assert same.shift > family.shift > method.shift > 0
    assert same.scale < family.scale < method.scale < 1


def test_runs_of_two_methods_inform_a_third() -> None:
    """Runs of two methods also move the belief about a third."""
    runs: list[tuple[Path, float]] = [(HERE, 0.1), (OTHERS[1], 0.1)]
    third: Path = ("l40s", "qlora", "llama")
    assert believe(runs, third, GPU_PRIOR).shift > believe(runs[:1], third, GPU_PRIOR).shift


@given(st.lists(LOGS, min_size=1, max_size=12))
def test_a_correction_stays_between_the_estimate_and_the_runs(logs: list[float]) -> None:
    assert min(0.0, *logs) - 1e-9 <= shift(*logs) <= max(0.0, *logs) + 1e-9


@given(LOGS, st.integers(1, 10))
def test_more_equal_runs_weigh_more_and_narrow_the_interval(y: float, runs: int) -> None:
    fewer, more = (believe([(HERE, y)] * n, HERE, GPU_PRIOR) for n in (runs, 2 * runs))
    assert abs(more.shift) >= abs(fewer.shift) - 1e-9
    assert more.scale < fewer.scale
    assert abs(shift(*[y] * 40) - y) <= 0.01 + 0.05 * abs(y)


@given(st.lists(st.floats(-0.05, 0.05), min_size=4, max_size=12), st.floats(0.5, 3.0), st.booleans())
def test_an_outlier_moves_the_correction_little(logs: list[float], size: float, faster: bool) -> None:
    """Outliers are for example throttled hosts at half speed, runs with stalls and wrong clocks."""
    outlier = size if faster else -size
    assert abs(shift(*logs, outlier) - shift(*logs)) < 0.02


def test_a_lone_outlier_moves_little_and_widens_until_others_say_the_same() -> None:
    alone = believe([(HERE, -0.7)], HERE, GPU_PRIOR)
    assert -0.05 < alone.shift < 0
    assert alone.scale > 1
    assert shift(*[-0.36] * 3) < -0.3  # three runs suffice to accept a GPU a third slower than estimated


@pytest.mark.parametrize("prior", [GPU_PRIOR, CPU_PRIOR])
def test_runs_that_disagree_keep_the_interval_wide(prior: Prior) -> None:
    wide = prior.run * 4
    agreed = believe([(HERE, 0.0)] * 8, HERE, prior)
    assert believe([(HERE, wide), (HERE, -wide)] * 4, HERE, prior).scale > 1.5 * agreed.scale


def test_nine_of_ten_next_runs_are_in_the_interval() -> None:
    """The simulated world matches the assumptions, with one host in ten throttled. The interval holds 90 % of the other
    hosts' runs.
    """
    draw, inside, asked = random.Random(7), 0, 0
    for _ in range(150):
        gpu = draw.gauss(0, 0.05)
        means: dict[Path, float] = {}
        runs: list[tuple[Path, float]] = []
        for _ in range(draw.randint(1, 10)):
            path: Path = ("l40s", draw.choice(["lora", "full"]), draw.choice(["llama", "qwen2"]))
            method = means.setdefault(path[:2], gpu + draw.gauss(0, 0.03))
            mean = means.setdefault(path, method + draw.gauss(0, 0.03))
            runs.append((path, mean + draw.gauss(0, 0.04) - (0.7 if draw.random() < 0.1 else 0.0)))
        path = runs[-1][0]
        belief = believe(runs, path, GPU_PRIOR)
        half = 1.645 * GPU_PRIOR.whole * belief.scale
        inside += abs(means[path] + draw.gauss(0, 0.04) - belief.shift) <= half
        asked += 1
    assert inside / asked >= 0.88
    assert math.isfinite(half)
