"""Suggestions for misspelt names, within a bound on the work.

`difflib` compares in time that is quadratic in the length of the names, and both sides may come from users. This is
the only module that may import `difflib`.
"""

import difflib
from collections.abc import Iterable

WORD_CHARACTERS = 48
"""Length of the longest name for which a suggestion is searched, and of the longest suggestion."""
CHOICES_CHARACTERS = 16_384
"""Total length of the names that are compared; later names are not."""


def close_matches(word: str, choices: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most `n` of the choices that resemble the word, best first.

    Takes at most about 0.1 s. Long names are ignored, and names beyond `CHOICES_CHARACTERS`.
    """
    if len(word) > WORD_CHARACTERS:
        return []
    compared, left = [], CHOICES_CHARACTERS
    for choice in choices:
        if len(choice) > WORD_CHARACTERS:
            continue
        left -= len(choice)
        if left < 0:
            break
        compared.append(choice)
    return difflib.get_close_matches(word, compared, n=n, cutoff=cutoff)


def short_list(names: Iterable[str], limit: int = 40) -> str:
    """Return the names for an error message, with long names cut and the rest beyond `limit` counted."""
    name_list = list(names)
    shortened = [name if len(name) <= WORD_CHARACTERS else f"{name[:WORD_CHARACTERS]}…" for name in name_list[:limit]]
    return ", ".join([*shortened, f"… ({len(name_list) - limit} more)"] if len(name_list) > limit else shortened)
