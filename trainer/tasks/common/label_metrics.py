"""What a class, a number or a tag of a text needs beside the text: the set of labels, and their scores."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.contract.train import DataConfig
from trainer.core.errors import DataFault
from trainer.dataset import cells
from trainer.dataset.prompts import source


class Labels:
    """The set of labels: the configured one, else those that are found, in the order of their texts."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self.names = tuple(data.labels)

    def settle(self, found: Iterable[str]) -> None:
        """`found`: the labels of all rows. Raises DataFault where there is nothing to tell apart."""
        if self.names:
            return
        self.names = tuple(sorted(set(found)))
        if self.names and (wrong := cells.bad_set(self.names, self._data.label)):
            raise DataFault(f"{source(self._data.path)}: {wrong}")

    def head(self) -> dict[str, Any]:
        """How a model's head is asked for."""
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
            "ignore_mismatched_sizes": True,
        }

    def number(self, label: str) -> int:
        return self.names.index(label)


def accuracy(judged: Sequence[tuple[int, int]]) -> float:
    """Share of (wanted, found) that are equal."""
    return sum(wanted == found for wanted, found in judged) / max(1, len(judged))


def macro_f1(judged: Sequence[tuple[int, int]]) -> float:
    """Mean F1 over the classes that are wanted or found."""
    right = Counter(wanted for wanted, found in judged if wanted == found)
    wanted, found = Counter(w for w, _ in judged), Counter(f for _, f in judged)
    scores = [2 * right[c] / (wanted[c] + found[c]) for c in sorted(wanted | found)]
    return sum(scores) / max(1, len(scores))


def errors(judged: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    """Mean absolute error, and the root of the mean squared one, in the label's own unit."""
    gaps = [abs(wanted - found) for wanted, found in judged]
    count = max(1, len(gaps))
    return {"mae": sum(gaps) / count, "rmse": (sum(g * g for g in gaps) / count) ** 0.5}


Span = tuple[str, int, int]
"""Kind, first word, word after the last."""


def spans(tags: Sequence[str]) -> frozenset[Span]:
    """What is named by tags in IOB2 (`B-PER I-PER O`); an `I-` that continues nothing begins a span, as conlleval has
    it.
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
    """F1 over whole spans of all texts, (wanted, found) of each; 0 where there is none."""
    right = sum(len(wanted & found) for wanted, found in judged)
    said = sum(len(wanted) + len(found) for wanted, found in judged)
    return 2 * right / said if said else 0.0
