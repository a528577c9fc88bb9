"""Formats durations, and regions that no cloud sells, for display."""

import difflib
from collections.abc import Collection, Iterable


def duration(seconds: float | None) -> str:
    """Return `45 s`, `3 min 20 s`, `2 h 05 min` or `3 d 4 h`; `–` for None."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def unsold_regions(requested: Iterable[str], sold: Collection[str]) -> tuple[str, ...]:
    """Return each of `requested` that is not in `sold`, with similar names; empty if `sold` is empty."""
    return (
        tuple(_with_suggestions(region, sorted(sold)) for region in sorted(set(requested) - set(sold))) if sold else ()
    )


def _with_suggestions(region: str, choices: list[str]) -> str:
    """Return `us-est-1 (did you mean us-east-1?)`, or a list of the choices where no name is similar."""
    same = [choice for choice in choices if choice.lower() == region.lower()]
    near = same or difflib.get_close_matches(region, choices, n=3)
    if near:
        return f"{region} (did you mean {' or '.join(near)}?)"
    return f"{region} (there are {', '.join(choices[:12])}{', …' if len(choices) > 12 else ''})"
