"""Finds requested regions in which no offer exists, by misspelling or because they are sold out."""

import difflib
from collections.abc import Collection, Iterable


def unsold(asked: Iterable[str], sold: Collection[str]) -> tuple[str, ...]:
    """Return each of `asked` that is not in `sold`, with similar names.

    The result is empty while nothing at all is sold.
    """
    return tuple(_named(region, sorted(sold)) for region in sorted(set(asked) - set(sold))) if sold else ()


def _named(region: str, choices: list[str]) -> str:
    """Return `us-est-1 (did you mean us-east-1?)`, or a list of the choices where no name is similar."""
    same = [one for one in choices if one.lower() == region.lower()]
    near = same or difflib.get_close_matches(region, choices, n=3)
    if near:
        return f"{region} (did you mean {' or '.join(near)}?)"
    return f"{region} (there are {', '.join(choices[:12])}{', …' if len(choices) > 12 else ''})"
