"""What was fitted, and on what: shares of the published rates that training reaches; and how far own runs correct it.

An own run tells the logarithm y of observed over estimated. Deviations are nested, each about the one above it: of a
GPU, of a method on it, of a family with that method, of a run: a tree of normal variables whose root is 0, the estimate
itself. `believe` is its exact posterior by messages (Pearl, 1988), which is James and Stein's shrinkage level by level:
one run moves a figure by v / (v + s^2) of what it says, v and s^2 the variances of what is shared and of a run. Runs
have Student's t about their cell, by the EM weights of Lange, Little and Taylor (1989): what lies far off is hardly
believed until others say the same.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shares of the rates in the hardware table. `matmul`, `attention`: by GPU that has rows; `*_else`: of others."""

    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    matmul_else: float
    attention_else: float
    bandwidth: float
    modules: float
    """Of the bandwidth, by what eager modules move; above 1 where the cache serves some of it."""
    within: float
    """Of NVLink or PCIe, one direction."""
    between: float
    """Of a machine's network."""
    exposed: float
    """Share of the messages that is never hidden."""
    hideable: float
    """Share of the computing that can hide messages."""
    sync_s: float
    """Per step and doubling of the devices."""

    def shares(self, gpu: str) -> tuple[float, float]:
        """(matmul, attention)."""
        return self.matmul.get(gpu, self.matmul_else), self.attention.get(gpu, self.attention_else)


FITTED = Calibration(
    matmul={"a100-40gb": 0.8550, "a100-80gb-sxm": 0.8944, "h100-sxm": 0.7842},
    attention={"a100-40gb": 0.4888, "a100-80gb-sxm": 0.4789, "h100-sxm": 0.5279},
    matmul_else=0.8538,
    attention_else=0.4947,
    bandwidth=0.8149,
    modules=1.1381,
    within=0.8,  # what nccl-tests show of NVLink's rate, so not fitted
    between=0.6642,
    exposed=0.4723,
    hideable=0.7,  # [assumed]: no row has that many messages
    sync_s=4.541e-3,
)
"""Fitted on 209 runs of llm-foundry, 4 of torchtitan and 19 of fms-acceleration (`python -m benchmarks.throughput_table
--fit`); `else` by a fit in which all GPUs share."""

COMPARED = frozenset({"llama", "mistral", "mixtral"})
"""Families whose eager modules were timed in those runs. MPT, which most of them are of, ran with fused kernels, so it
stands for no family that the trainer runs."""

SPREAD_MEASURED = 1.113
"""Conformal: nine of ten runs of transformers and torchtitan on GPUs of the fit are so far off at most, either way, by
fits that had not seen their method."""
SPREAD_UNMEASURED = 1.31
"""The worst of 237 rows by a fit without their architecture. Three architectures are too few for a quantile."""
SPREAD_MIXTURE = 1.4
"""The worst of ten blind rows of Mixtral-8x7B, all of them slower than estimated."""
SPREAD_COUNTED = 2.0
"""Where operations are counted and no run of such a model was ever measured [assumed]."""
SPREAD_CPU = 2.0
"""Processors differ by more than any share tells [assumed]; one was measured."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Standard deviations of logarithms [assumed]: of each level about the one above it, and of a run."""

    levels: tuple[float, ...]
    run: float

    @property
    def whole(self) -> float:
        """Of a run about the estimate, when nothing was observed."""
        return sqrt(sum(level**2 for level in self.levels) + self.run**2)


GPU_PRIOR = Prior(levels=(0.05, 0.03, 0.03), run=0.04)
"""Of a GPU, a method, a family. That of a run is what repeated rows of one GPU and library scatter by."""
CPU_PRIOR = Prior(levels=(0.4, 0.1, 0.1), run=0.15)
"""Processors differ, and work beside others: nearly as wide as `SPREAD_CPU`."""
FREEDOM = 4.0
"""Degrees of freedom of Student's t, as Lange, Little and Taylor advise for small samples."""
WORTH = 8.0
"""Runs that the assumed deviation of a run counts for, once that is estimated too."""
ROUNDS, SETTLED = 30, 1e-6

Path = tuple[str, ...]
"""Where a run belongs, level by level: (GPU, method, family)."""
Gauss = tuple[float, float]
"""(mean, precision)."""


@dataclass(frozen=True, kw_only=True)
class Belief:
    """What is expected of the next run."""

    shift: float = 0.0
    """Logarithm of observed over estimated."""
    scale: float = 1.0
    """Width of the interval, as a share of what it is when nothing was observed."""
    runs: int = 0
    """That share the first level."""
    alike: bool = False
    """Some of them share all levels."""


NO_RUNS = Belief()


def _joined(parts: Sequence[Gauss]) -> Gauss:
    precision = sum(p for _, p in parts)
    return (sum(m * p for m, p in parts) / precision if precision else 0.0), precision


def _blurred(of: Gauss, deviation: float) -> Gauss:
    """As seen from the next level."""
    return of[0], 1 / (1 / of[1] + deviation**2) if of[1] else 0.0


def _upward(cells: Mapping[Path, Gauss], prior: Prior) -> dict[Path, dict[Path, Gauss]]:
    """What each node's children say of it; of the leaves' children, the runs, there is one entry."""
    told: dict[Path, dict[Path, Gauss]] = defaultdict(dict)
    for path, said in cells.items():
        told[path][path] = said
    for depth in range(len(prior.levels), 0, -1):
        for path in [p for p in told if len(p) == depth]:
            told[path[:-1]][path] = _blurred(_joined(list(told[path].values())), prior.levels[depth - 1])
    return told


def _posterior(path: Path, told: Mapping[Path, Mapping[Path, Gauss]], prior: Prior) -> Gauss:
    at: Gauss = (0.0, inf)  # the root: the estimate itself
    for depth, deviation in enumerate(prior.levels, 1):
        child = path[:depth]
        others = [said for one, said in told.get(path[: depth - 1], {}).items() if one != child]
        parent = at if at[1] == inf else _joined([at, *others])
        at = (parent[0], 1 / ((1 / parent[1] if parent[1] != inf else 0.0) + deviation**2))
    return _joined([at, *told.get(path, {}).values()])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All runs that share the first level, weighed."""

    prior: Prior
    told: Mapping[Path, Mapping[Path, Gauss]]
    variance: float
    """Of a run."""
    runs: int

    def of(self, path: Path) -> Belief:
        """What is known of a path below that level."""
        mean, precision = _posterior(path, self.told, self.prior)
        scale = sqrt(1 / precision + self.variance) / self.prior.whole
        return Belief(shift=mean, scale=scale, runs=self.runs, alike=path in self.told.get(path, {}))


def weigh(near: Sequence[tuple[Path, float]], prior: Prior) -> Evidence:
    """`near`: runs of one first level, each (where it belongs, logarithm of observed over estimated)."""
    cells = {where for where, _ in near}
    noise, squares = prior.run**2, 0.0
    told: dict[Path, dict[Path, Gauss]] = {}
    means = dict.fromkeys(cells, 0.0)  # from the estimate itself, so that no lone outlier is the beginning
    for _ in range(ROUNDS):
        off = [(y - means[where]) ** 2 / noise for where, y in near]
        weights = [(FREEDOM + 1) / (FREEDOM + square) for square in off]
        squares = sum(w * square for w, square in zip(weights, off, strict=True)) * noise
        by_cell: dict[Path, list[Gauss]] = defaultdict(list)
        for (where, y), weight in zip(near, weights, strict=True):
            by_cell[where].append((y, weight / noise))
        told = _upward({where: _joined(said) for where, said in by_cell.items()}, prior)
        before, means = means, {where: _posterior(where, told, prior)[0] for where in cells}
        if all(abs(means[where] - before[where]) < SETTLED for where in cells):
            break
    variance = max(noise, (WORTH * noise + squares) / (WORTH + len(near)))
    return Evidence(prior=prior, told=told, variance=variance, runs=len(near))


def believe(runs: Sequence[tuple[Path, float]], path: Path, prior: Prior) -> Belief:
    """What is known of `path` after `runs`, each (where it belongs, logarithm of observed over estimated)."""
    near = [(where, y) for where, y in runs if where[0] == path[0]]
    return weigh(near, prior).of(path) if near else NO_RUNS
