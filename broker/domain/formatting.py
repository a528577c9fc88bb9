"""Formats durations, regions that no cloud sells, and texts of hosts and users, for display.

Hosts and users write names, labels, messages and errors. Such a text could move a terminal's cursor, forge a log line,
reverse the reading direction, or start a formula in a spreadsheet. `visible` is applied wherever one is shown.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from trainer.contract.suggestions import close_matches

_CODES = (
    *range(0x20),  # C0
    *range(0x7F, 0xA0),  # DEL and C1
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # marks and overrides of direction
    *(0x2028, 0x2029),  # line and paragraph separator
    *range(0xD800, 0xE000),  # unpaired surrogates, which no stream can encode
)
_ESCAPES = {code: f"\\u{code:04x}" for code in _CODES} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_FORMULA = ("=", "+", "-", "@")
"""Characters that begin a formula in a spreadsheet; see OWASP, CSV injection."""


def duration(seconds: float | None) -> str:
    """Return `45 s`, `3 min 20 s`, `2 h 05 min` or `3 d 4 h`; `–` for None."""
    if seconds is None:
        return "–"
    total = round(seconds)
    if total < 60:
        return f"{seconds:.0f} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86_400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86_400} d {total % 86_400 // 3600} h"


def unsold_regions(requested: Iterable[str], offered: Collection[str]) -> tuple[str, ...]:
    """Return each of `requested` that is not in `offered`, with similar names; empty if `offered` is empty."""
    return (
        tuple(_with_suggestions(region, sorted(offered)) for region in sorted(set(requested) - set(offered)))
        if offered
        else ()
    )


def _with_suggestions(region: str, choices: list[str]) -> str:
    """Return `us-est-1 (did you mean us-east-1?)`, or a list of the choices where no name is similar."""
    same = [choice for choice in choices if choice.lower() == region.lower()]
    nearest = same or close_matches(region, choices, n=3)
    if nearest:
        return f"{region} (did you mean {' or '.join(nearest)}?)"
    return f"{region} (there are {', '.join(choices[:12])}{', …' if len(choices) > 12 else ''})"


def visible(text: str, *, keep: str = "") -> str:
    """Return `text` with its control characters as escapes of six characters, or of two for line breaks and tabs.

    The escapes are those of JSON, so that a JSON document keeps its meaning. `keep`: characters left as they are.
    """
    if text.isprintable():
        return text
    return text.translate(_escapes_without(keep))


@lru_cache(maxsize=16)
def _escapes_without(keep: str) -> Mapping[int, str]:
    return {code: escape for code, escape in _ESCAPES.items() if chr(code) not in keep}


def visible_document(value: Any) -> Any:
    """Return a JSON document whose texts and keys are visible; lines and tabs are kept in texts."""
    if isinstance(value, str):
        return visible(value, keep="\n\t")
    if isinstance(value, Mapping):
        return {visible(str(key)): visible_document(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [visible_document(inner) for inner in value]
    return value


def csv_cell(value: object) -> object:
    """Return a cell of a CSV file that no spreadsheet runs as a formula; numbers stay as they are."""
    if not isinstance(value, str):
        return value
    visible_value = visible(value)
    return f"'{visible_value}" if visible_value.lstrip().startswith(_FORMULA) else visible_value
