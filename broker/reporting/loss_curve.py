"""Loss curves from the trainer's metrics."""

import json
import math

Losses = tuple[tuple[int, float], ...]
"""Pairs of (optimizer step, loss), by step."""
BARS = "▁▂▃▄▅▆▇█"


def losses(raw: bytes) -> Losses:
    """Return the losses in `metrics.jsonl`; a later line of a step replaces an earlier one."""
    by_step: dict[int, float] = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
            by_step[int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return tuple(sorted(by_step.items()))


def sparkline(curve: Losses, width: int = 40) -> str:
    """Return the curve as at most `width` bars: means over equal parts of the steps, without infinite losses."""
    values = [loss for _, loss in curve if math.isfinite(loss)]
    if not values:
        return ""
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    share_means = [math.fsum(v / len(share) for v in share) for share in shares]
    # Halved, because the difference of two finite numbers may be infinite.
    low, high = min(share_means) / 2, max(share_means) / 2
    span = high - low
    return "".join(
        BARS[round((share_mean / 2 - low) / span * (len(BARS) - 1)) if span else 0] for share_mean in share_means
    )
