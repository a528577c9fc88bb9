"""Label sets and metrics of classification, regression and tagging."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.contract.data_config import DataConfig
from trainer.core.errors import DataFault
from trainer.dataset import cells
from trainer.dataset.prompts import dataset_name


class Labels:
    """Set of labels: the configured ones, or those of the data in alphabetical order."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self.names = tuple(data.labels)

    def collect(self, labels: Iterable[str]) -> None:
        """Set the labels from those of all rows, unless the configuration has labels.

        Raises DataFault if the set is invalid, e.g. has a single label.
        """
        if self.names:
            return
        self.names = tuple(sorted(set(labels)))
        if self.names and (problem := cells.label_set_problem(self.names, self._data.label)):
            raise DataFault(f"{dataset_name(self._data.path)}: {problem}")

    def head_options(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` for a head with these labels."""
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
            "ignore_mismatched_sizes": True,
        }

    def number(self, label: str) -> int:
        """Return the label's index, which is its class number."""
        return self.names.index(label)


def accuracy(judged: Sequence[tuple[int, int]]) -> float:
    """Return the share of (expected, predicted) pairs that are equal."""
    return sum(expected == predicted for expected, predicted in judged) / max(1, len(judged))


def macro_f1(judged: Sequence[tuple[int, int]]) -> float:
    """Return the mean F1 over the classes that are expected or predicted at least once."""
    correct = Counter(expected for expected, predicted in judged if expected == predicted)
    expected_counts, predicted_counts = Counter(e for e, _ in judged), Counter(p for _, p in judged)
    classes = sorted(expected_counts | predicted_counts)
    scores = [2 * correct[c] / (expected_counts[c] + predicted_counts[c]) for c in classes]
    return sum(scores) / max(1, len(scores))


def errors(judged: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    """Return the mean absolute error and the root mean squared error, in the label's unit."""
    gaps = [abs(expected - predicted) for expected, predicted in judged]
    count = max(1, len(gaps))
    return {"mae": sum(gaps) / count, "rmse": (sum(g * g for g in gaps) / count) ** 0.5}


Span = tuple[str, int, int]
"""Entity kind, index of the first word, index after the last word."""


def spans(tags: Sequence[str]) -> frozenset[Span]:
    """Return the spans of tags in IOB2 (`B-PER I-PER O`).

    An `I-` tag without a span before it begins a span, as in conlleval.
    """
    complete: set[Span] = set()
    kind, start = "", 0
    for number, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if kind and (mark != "I" or name != kind):
            complete.add((kind, start, number))
            kind = ""
        if mark in ("B", "I") and not kind:
            kind, start = name, number
    return frozenset(complete)


def span_f1(judged: Sequence[Sequence[frozenset[Span]]]) -> float:
    """Return the F1 over whole spans of all texts; 0 if there are none. `judged`: (expected, predicted) per text."""
    correct = sum(len(expected & predicted) for expected, predicted in judged)
    total = sum(len(expected) + len(predicted) for expected, predicted in judged)
    return 2 * correct / total if total else 0.0


WORD = re.compile(r"\w+")


def rouge_l(reference: str, generated: str) -> float:
    """Return the F1 of the longest common subsequence of words, in lower case and without punctuation; 0..1."""
    expected, actual = WORD.findall(reference.lower()), WORD.findall(generated.lower())
    common = _common_length(expected, actual)
    return 2 * common / (len(expected) + len(actual)) if common else 0.0


def _common_length(first: list[str], second: list[str]) -> int:
    """Return the length of the longest common subsequence, computed one table row at a time."""
    above = [0] * (len(second) + 1)
    for word in first:
        row = [0]
        for column, other in enumerate(second):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        above = row
    return above[-1]
