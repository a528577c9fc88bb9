"""Fit the shares of `broker.estimator.speed.calibration` to measured speeds: robust least squares of the logarithms."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.throughput_rows import Row
from broker.estimator.speed.calibration import FITTED, Calibration
from broker.estimator.speed.hardware import TABLE
from broker.estimator.speed.roofline import terms

Vector = NDArray[np.float64]
ROUGH = 0.03
"""Residuals above 3 % pull less than their square: some rows have causes that no term knows."""
SCALES = ("matmul_else", "attention_else", "bandwidth", "modules", "between", "exposed", "sync_s")
ROUNDS = 40
START = replace(FITTED, matmul={}, attention={}, matmul_else=0.85, attention_else=0.5, bandwidth=0.8, modules=0.8,
                between=0.5, exposed=0.5, sync_s=4e-3)  # fmt: skip


def seconds(row: Row, by: Calibration) -> float:
    """Return the seconds of one step."""
    return sum(terms(i, by).total for i in row.at_best) / len(row.at_best)


def surprise(row: Row, by: Calibration) -> float:
    """Return the logarithm of estimated over measured tokens/s."""
    return math.log(row.tokens / seconds(row, by) / row.rate)


def _unpacked(x: Vector, gpus: Sequence[str]) -> Calibration:
    values: dict[str, Any] = dict(zip(SCALES, np.exp(x).tolist(), strict=False))
    own = np.exp(x[len(SCALES) :]).tolist()
    matmul = dict(zip(gpus, own[: len(gpus)], strict=True))
    attention = dict(zip(gpus, own[len(gpus) :], strict=True))
    return replace(START, **values, matmul=matmul, attention=attention)


def _weights(residuals: Vector) -> Vector:
    found: Vector = 1 / np.sqrt(1 + (residuals / ROUGH) ** 2) / ROUGH**2
    return found


def _cost(residuals: Vector) -> float:
    return float(np.sum(np.sqrt(1 + (residuals / ROUGH) ** 2) - 1))


def fit(rows: Sequence[Row], *, per_gpu: bool) -> Calibration:
    """Fit by Levenberg and Marquardt. `per_gpu`: each GPU has its own shares for products and attention; otherwise one
    share for all.
    """
    gpus = sorted({r.gpu for r in rows}) if per_gpu else []
    start = [math.log(getattr(START, name)) for name in SCALES]
    start += [math.log(START.matmul_else)] * len(gpus) + [math.log(START.attention_else)] * len(gpus)
    x = np.array(start)

    def residuals(at: Vector) -> Vector:
        by = _unpacked(at, gpus)
        return np.array([surprise(row, by) for row in rows])

    now, damping = residuals(x), 1e-2
    cost = _cost(now)
    for _ in range(ROUNDS):
        slopes = np.empty((len(rows), len(x)))
        for j in range(len(x)):
            moved = x.copy()
            moved[j] += 1e-5
            slopes[:, j] = (residuals(moved) - now) / 1e-5
        weights = _weights(now)
        normal, gradient = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * now)
        scale = np.diag(np.diag(normal) + 1e-6)
        before = cost
        while damping < 1e9:
            step = np.clip(np.linalg.solve(normal + damping * scale, -gradient), -0.5, 0.5)
            there = residuals(x + step)
            if _cost(there) < cost:
                x, now, cost, damping = x + step, there, _cost(there), damping / 4
                break
            damping *= 4
        if before - cost < 1e-6 * before:
            break
    return _unpacked(x, gpus)


def fitted(rows: Sequence[Row]) -> Calibration:
    """Each GPU of `rows` that is for rent with its own shares, every other one with those that serve all best."""
    own, shared = fit(rows, per_gpu=True), fit(rows, per_gpu=False)
    return replace(
        own,
        matmul={gpu: share for gpu, share in own.matmul.items() if gpu in TABLE},
        attention={gpu: share for gpu, share in own.attention.items() if gpu in TABLE},
        matmul_else=shared.matmul_else,
        attention_else=shared.attention_else,
    )


def quantile(surprises: Iterable[float], coverage: float) -> float:
    """Return the split-conformal bound of a new surprise's absolute value at this probability."""
    sizes = sorted(abs(s) for s in surprises)
    return sizes[min(len(sizes), math.ceil((len(sizes) + 1) * coverage)) - 1]
