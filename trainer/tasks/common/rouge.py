"""ROUGE-L (Lin 2004): similarity of two texts by the longest common subsequence of words."""

import re

WORD = re.compile(r"\w+")


def rouge_l(wanted: str, found: str) -> float:
    """Return the F1 of the longest common subsequence of words, in lower case and without punctuation; 0..1."""
    one, other = WORD.findall(wanted.lower()), WORD.findall(found.lower())
    common = _common(one, other)
    return 2 * common / (len(one) + len(other)) if common else 0.0


def _common(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence, computed one table row at a time."""
    above = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for place, against in enumerate(other):
            row.append(above[place] + 1 if word == against else max(above[place + 1], row[place]))
        above = row
    return above[-1]
