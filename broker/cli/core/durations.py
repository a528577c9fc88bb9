"""Durations and lists of names as users write them in options."""

import re
from collections.abc import Iterable

from broker.cli.core.exit_codes import BadInput

UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd]?)")


def seconds(option: str, text: str, *, most_s: float = float("inf")) -> float:
    """Return `90`, `90s`, `15m`, `1.5h` or `2d` in seconds. Raises BadInput."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"{option} {text}: write a time as 90s, 15m or 2h")
    value = float(match[1]) * UNITS_S[match[2]]
    if value > most_s:
        raise BadInput(f"{option} {text}: longer than {most_s / 3600:g}h; give a shorter time")
    return value


def names(texts: Iterable[str]) -> list[str]:
    """Return the names in comma-separated lists such as `H100,RTX4090`."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
