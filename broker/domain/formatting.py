"""Formats numbers for display."""


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
