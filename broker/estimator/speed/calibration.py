"""Fitted shares of the published rates that training reaches, and corrections by own runs.

A run gives the logarithm y of observed over estimated. Deviations are nested: of a GPU, of a method on it, of a family
with that method, of a run. They form a tree of normal variables whose root is 0, the estimate itself. `believe` is its
exact posterior by message passing (Pearl, 1988), which is James and Stein's shrinkage level by level. One run moves a
figure by the share v / (v + s^2) of its deviation. v is the variance of what is shared, s^2 the variance of a run. Runs
follow Student's t around their cell, by the EM weights of Lange, Little and Taylor (1989). An outlier therefore counts
little until other runs confirm it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shares of the rates in the hardware table. `matmul`, `attention`: by fitted GPU; `*_else`: for all other GPUs."""

    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    matmul_else: float
    attention_else: float
    bandwidth: float
    modules: float
    """Share of the bandwidth for the traffic of eager modules; above 1 where the cache serves some of it."""
    within: float
    """Share of NVLink's or PCIe's rate, one direction."""
    between: float
    """Share of a machine's network rate."""
    exposed: float
    """Share of the messages that is never hidden."""
    hideable: float
    """Share of the computation that can hide messages."""
    sync_s: float
    """Seconds per step and doubling of the devices."""

    def shares(self, gpu: str) -> tuple[float, float]:
        """Return (matmul, attention)."""
        return self.matmul.get(gpu, self.matmul_else), self.attention.get(gpu, self.attention_else)


FITTED = Calibration(
    matmul={"a100-40gb": 0.8550, "a100-80gb-sxm": 0.8944, "h100-sxm": 0.7842},
    attention={"a100-40gb": 0.4888, "a100-80gb-sxm": 0.4789, "h100-sxm": 0.5279},
    matmul_else=0.8538,
    attention_else=0.4947,
    bandwidth=0.8149,
    modules=1.1381,
    within=0.8,  # nccl-tests' share of NVLink's rate, so not fitted
    between=0.6642,
    exposed=0.4723,
    hideable=0.7,  # [assumed]: no row has that many messages
    sync_s=4.541e-3,
)
"""Fitted on 209 runs of llm-foundry, 4 of torchtitan and 19 of fms-acceleration (`python -m benchmarks.throughput_table
--fit`); `*_else` by a fit with one share for all GPUs.
"""

COMPARED = frozenset({"llama", "mistral", "mixtral"})
"""Families whose eager modules were timed in those runs. Most of the runs are of MPT with fused kernels, which
represents no family that the trainer runs.
"""

SPREAD_MEASURED = 1.203
"""Conformal 90 % interval over groups: the largest 90 % quantile of a group's errors, by fits without the group.

Seven groups calibrate it (`benchmarks.throughput_table`). Three of them are of later runs, which no fit used.
"""
SPREAD_OTHER_CODE = 1.792
"""Conformal 90 % interval for the code of an unseen laboratory, on a GPU and family of the fit.

Groups of published rows calibrate it, each a laboratory with its code base (`benchmarks.throughput_groups`).
"""
SPREAD_OTHER_CODE_FAR = 2.142
"""The same interval for other GPUs, families and ways to divide the work."""
SPREAD_UNMEASURED = 1.31
"""The worst of 237 rows by a fit without their architecture. Three architectures are too few for a quantile."""
SPREAD_MIXTURE = 1.4
"""The worst of ten blind rows of Mixtral-8x7B, all of them slower than estimated."""
SPREAD_COUNTED = 2.0
"""Interval for counted operations without any measured run of such a model [assumed]."""
SPREAD_CPU = 2.0
"""Interval for CPUs, which differ by more than any share covers [assumed]; one was measured."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Standard deviations of logarithms [assumed]: of each level from the level above it, and of a run."""

    levels: tuple[float, ...]
    run: float

    @property
    def whole(self) -> float:
        """Standard deviation of a run from the estimate, without any observation."""
        return sqrt(sum(level**2 for level in self.levels) + self.run**2)


GPU_PRIOR = Prior(levels=(0.05, 0.03, 0.03), run=0.04)
"""Deviations of a GPU, a method, a family. The deviation of a run is the scatter of repeated rows of one GPU and
library.
"""
CPU_PRIOR = Prior(levels=(0.4, 0.1, 0.1), run=0.15)
"""Deviations of CPUs, nearly as wide as `SPREAD_CPU`, because CPUs differ and other processes share them."""
FREEDOM = 4.0
"""Degrees of freedom of Student's t, as Lange, Little and Taylor advise for small samples."""
PRIOR_RUNS = 8.0
"""Weight, in runs, of the assumed deviation of a run when that deviation is estimated from runs."""
ROUNDS, SETTLED = 30, 1e-6

Path = tuple[str, ...]
"""Group of a run, level by level: (GPU, method, family)."""
Gauss = tuple[float, float]
"""(mean, precision)."""


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Expectation of the next run."""

    shift: float = 0.0
    """Logarithm of observed over estimated."""
    scale: float = 1.0
    """Width of the interval, relative to its width without observations."""
    runs: int = 0
    """Number of runs that share the first level."""
    alike: bool = False
    """True if some of these runs share all levels."""


NO_RUNS = Belief()


def _joined(messages: Sequence[Gauss]) -> Gauss:
    precision = sum(p for _, p in messages)
    return (sum(m * p for m, p in messages) / precision if precision else 0.0), precision


def _blurred(message: Gauss, deviation: float) -> Gauss:
    """Return the message as the next level receives it."""
    return message[0], 1 / (1 / message[1] + deviation**2) if message[1] else 0.0


def _upward(cells: Mapping[Path, Gauss], prior: Prior) -> dict[Path, dict[Path, Gauss]]:
    """Return the messages that each node gets from its children; a leaf has one entry for all its runs."""
    messages: dict[Path, dict[Path, Gauss]] = defaultdict(dict)
    for path, message in cells.items():
        messages[path][path] = message
    for depth in range(len(prior.levels), 0, -1):
        for path in [p for p in messages if len(p) == depth]:
            messages[path[:-1]][path] = _blurred(_joined(list(messages[path].values())), prior.levels[depth - 1])
    return messages


def _posterior(path: Path, messages: Mapping[Path, Mapping[Path, Gauss]], prior: Prior) -> Gauss:
    at: Gauss = (0.0, inf)  # the root: the estimate itself
    for depth, deviation in enumerate(prior.levels, 1):
        child = path[:depth]
        others = [message for sibling, message in messages.get(path[: depth - 1], {}).items() if sibling != child]
        parent = at if at[1] == inf else _joined([at, *others])
        at = (parent[0], 1 / ((1 / parent[1] if parent[1] != inf else 0.0) + deviation**2))
    return _joined([at, *messages.get(path, {}).values()])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Weighed runs that share the first level."""

    prior: Prior
    messages: Mapping[Path, Mapping[Path, Gauss]]
    variance: float
    """Variance of a run."""
    runs: int

    def of(self, path: Path) -> Belief:
        """Return the belief about a path below that level."""
        mean, precision = _posterior(path, self.messages, self.prior)
        scale = sqrt(1 / precision + self.variance) / self.prior.whole
        return Belief(shift=mean, scale=scale, runs=self.runs, alike=path in self.messages.get(path, {}))


def weigh(weighted_runs: Sequence[tuple[Path, float]], prior: Prior) -> Evidence:
    """Weigh runs that share the first level, each (group, logarithm of observed over estimated)."""
    cells = {where for where, _ in weighted_runs}
    noise, squares = prior.run**2, 0.0
    messages: dict[Path, dict[Path, Gauss]] = {}
    # start from the estimate itself, so that a lone outlier is not the starting point
    cell_means = dict.fromkeys(cells, 0.0)
    for _ in range(ROUNDS):
        deviations = [(y - cell_means[where]) ** 2 / noise for where, y in weighted_runs]
        weights = [(FREEDOM + 1) / (FREEDOM + square) for square in deviations]
        squares = sum(w * square for w, square in zip(weights, deviations, strict=True)) * noise
        by_cell: dict[Path, list[Gauss]] = defaultdict(list)
        for (where, y), weight in zip(weighted_runs, weights, strict=True):
            by_cell[where].append((y, weight / noise))
        messages = _upward({where: _joined(values) for where, values in by_cell.items()}, prior)
        before, cell_means = cell_means, {where: _posterior(where, messages, prior)[0] for where in cells}
        if all(abs(cell_means[where] - before[where]) < SETTLED for where in cells):
            break
    variance = max(noise, (PRIOR_RUNS * noise + squares) / (PRIOR_RUNS + len(weighted_runs)))
    return Evidence(prior=prior, messages=messages, variance=variance, runs=len(weighted_runs))


def believe(runs: Sequence[tuple[Path, float]], path: Path, prior: Prior) -> Belief:
    """Return the belief about `path` after `runs`, each (group, logarithm of observed over estimated)."""
    close_runs = [(where, y) for where, y in runs if where[0] == path[0]]
    return weigh(close_runs, prior).of(path) if close_runs else NO_RUNS
