"""A scaling table as the page Estimate shows it: rows with bars of memory, the two best rows, and the plot. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from broker.api.schemas.quotes import WhatIfPoint, WhatIfView
from broker.web.quote_view import MemoryPart

PARTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "temporary", "communication", "context", "margin",
)  # fmt: skip
"""Categories of memory, in the order of the bar."""


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    point: WhatIfPoint
    plan: str
    parts: tuple[MemoryPart, ...]


@dataclass(frozen=True, kw_only=True)
class ScalingSummary:
    rows: tuple[ScalingRow, ...]
    parts: tuple[str, ...]
    """Categories that any row has."""
    fewest: WhatIfPoint | None
    """Row with the fewest GPUs on which the training fits; None: it fits on none."""
    cheapest: WhatIfPoint | None
    """Row with the least dollars; None: dollars or hours are not known."""
    quickest: WhatIfPoint | None
    """Row with the least hours; None: hours are not known."""
    plot: str
    """Points of the plot as JSON; empty: fewer than two points fit."""


def scaling_summary(view: WhatIfView) -> ScalingSummary:
    fitting = [point for point in view.points if point.plan is not None]
    return ScalingSummary(
        rows=tuple(
            ScalingRow(point=point, plan=plan_text(point), parts=memory_parts(point, view.gpu_memory_bytes))
            for point in view.points
        ),
        parts=tuple(name for name in PARTS if any(point.memory_bytes.get(name) for point in view.points)),
        fewest=fitting[0] if fitting else None,
        cheapest=min((p for p in fitting if p.usd is not None), key=lambda p: (p.usd or 0, p.hours or 0), default=None),
        quickest=min((p for p in fitting if p.hours is not None), key=lambda p: p.hours or 0, default=None),
        plot=_plot(fitting),
    )


def plan_text(point: WhatIfPoint) -> str:
    """Return the plan in words: `fsdp on 8: 2 × 4, recomputing`."""
    plan = point.plan
    if plan is None:
        return "does not fit"
    idle = f" of {point.gpus}" if plan.devices < point.gpus else ""
    recomputing = ", recomputing" if plan.gradient_checkpointing else ""
    return f"{plan.parallelism} on {plan.devices}{idle}: {plan.accumulation} × {plan.micro_batch}{recomputing}"


def memory_parts(point: WhatIfPoint, card: int) -> tuple[MemoryPart, ...]:
    """Return the categories of memory as bars of the card; a bar ends at the card's end."""
    parts, x = [], 0.0
    for name in PARTS:
        count = point.memory_bytes.get(name, 0)
        width = min(100 - x, 100 * count / max(1, card))
        if width > 0:
            parts.append(MemoryPart(name=name, bytes=count, x=round(x, 3), width=round(width, 3)))
        x += width
    return tuple(parts)


def _plot(points: Sequence[WhatIfPoint]) -> str:
    """Return columns of the plot as JSON. `linear`: the speed of the fewest GPUs, multiplied by the count."""
    points_known = [(p.gpus, p.tokens_per_s, p.tokens_per_s_interval) for p in points]
    rows = [
        (gpus, rate, *interval) for gpus, rate, interval in points_known if rate is not None and interval is not None
    ]
    if len(rows) < 2:
        return ""
    gpus, rates, low, high = zip(*rows, strict=True)
    linear = [rates[0] * count / gpus[0] for count in gpus]
    return json.dumps({"gpus": gpus, "rate": rates, "low": low, "high": high, "linear": linear})
