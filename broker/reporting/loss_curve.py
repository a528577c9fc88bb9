"""The loss curve, as the trainer's metrics tell it."""

import json
import math

Losses = tuple[tuple[int, float], ...]
"""(optimizer step, loss), by step."""
BARS = "▁▂▃▄▅▆▇█"


def losses(raw: bytes) -> Losses:
    """Of each line of `metrics.jsonl` that has step and loss; a later line of a step replaces an earlier one."""
    found: dict[int, float] = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
            found[int(row["step"])] = float(row["loss"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return tuple(sorted(found.items()))


def sparkline(curve: Losses, width: int = 40) -> str:
    """The curve as one line of at most `width` bars: means over equal shares of the steps, infinite ones left out."""
    values = [loss for _, loss in curve if math.isfinite(loss)]
    if not values:
        return ""
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [math.fsum(v / len(share) for v in share) for share in shares]
    low, high = min(means) / 2, max(means) / 2  # halves: the way between two finite numbers may be infinite
    way = high - low
    return "".join(BARS[round((mean / 2 - low) / way * (len(BARS) - 1)) if way else 0] for mean in means)
