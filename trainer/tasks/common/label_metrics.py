"""Label sets and metrics of classification, regression and tagging."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.contract.data_config import DataConfig
from trainer.core.errors import DataFault
from trainer.dataset import cells
from trainer.dataset.prompts import source


class Labels:
    """Set of labels: the configured ones, or those of the data in alphabetical order."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self.names = tuple(data.labels)

    def settle(self, found: Iterable[str]) -> None:
        """Set the labels from those of all rows. Raises DataFault if the set is invalid, e.g. has a single label."""
        if self.names:
            return
        self.names = tuple(sorted(set(found)))
        if self.names and (wrong := cells.bad_set(self.names, self._data.label)):
            raise DataFault(f"{source(self._data.path)}: {wrong}")

    def head(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` for a head with these labels."""
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
            "ignore_mismatched_sizes": True,
        }

    def number(self, label: str) -> int:
        return self.names.index(label)


def accuracy(judged: Sequence[tuple[int, int]]) -> float:
    """Return the share of (expected, predicted) pairs that are equal."""
    return sum(wanted == found for wanted, found in judged) / max(1, len(judged))


def macro_f1(judged: Sequence[tuple[int, int]]) -> float:
    """Return the mean F1 over the classes that are expected or predicted at least once."""
    right = Counter(wanted for wanted, found in judged if wanted == found)
    wanted, found = Counter(w for w, _ in judged), Counter(f for _, f in judged)
    scores = [2 * right[c] / (wanted[c] + found[c]) for c in sorted(wanted | found)]
    return sum(scores) / max(1, len(scores))


def errors(judged: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    """Return the mean absolute error and the root mean squared error, in the label's unit."""
    gaps = [abs(wanted - found) for wanted, found in judged]
    count = max(1, len(gaps))
    return {"mae": sum(gaps) / count, "rmse": (sum(g * g for g in gaps) / count) ** 0.5}


Span = tuple[str, int, int]
"""Entity kind, index of the first word, index after the last word."""


def spans(tags: Sequence[str]) -> frozenset[Span]:
    """Return the spans of tags in IOB2 (`B-PER I-PER O`).

    An `I-` tag without a span before it begins a span, as in conlleval.
    """
    found: set[Span] = set()
    kind, start = "", 0
    for number, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if kind and (mark != "I" or name != kind):
            found.add((kind, start, number))
            kind = ""
        if mark in ("B", "I") and not kind:
            kind, start = name, number
    return frozenset(found)


def span_f1(judged: Sequence[Sequence[frozenset[Span]]]) -> float:
    """Return the F1 over whole spans of all texts; 0 if there are none. `judged`: (expected, predicted) per text."""
    right = sum(len(wanted & found) for wanted, found in judged)
    said = sum(len(wanted) + len(found) for wanted, found in judged)
    return 2 * right / said if said else 0.0


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
