"""Label sets and metrics of classification, regression and tagging."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.contract.data_config import DataConfig
from trainer.core.errors import DataFault
from trainer.dataset import cells
from trainer.dataset.prompts import dataset_name

UNLABELLED = ("-1", "0", "1")
"""Classes of a column in which -1 may mean that a row has no label, as in SNLI and in GLUE's test sets."""


class Labels:
    """Set of labels: the configured ones, or those of the data.

    Labels that equal those of the model's head have the head's order. Other labels of the data are in the order of
    `sorted_labels`.
    """

    def __init__(
        self, data: DataConfig, head: Sequence[str] = (), notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """`head`: classes of the model's own head, in order; empty: it has none. `notice`: receives texts for users."""
        self._data, self._head = data, tuple(head)
        self.names = tuple(data.labels)
        if set(self.names) == set(self._head) and self.names != self._head:
            self.names = self._head
            notice("the class numbers are those of the model's head, whose order is not that of data.labels")
        self._notice = notice
        self._compare_with_head()

    def collect(self, labels: Iterable[str]) -> None:
        """Set the labels from those of all rows, unless the configuration has labels.

        Raises DataFault if the set is invalid, e.g. has a single label.
        """
        if self.names:
            return
        self.names = cells.sorted_labels(labels)
        if set(self.names) == set(self._head):
            self.names = self._head
        if self.names and (problem := cells.label_set_problem(self.names, self._data.label)):
            raise DataFault(f"{dataset_name(self._data.path)}: {problem}")
        self._compare_with_head()
        if set(UNLABELLED).issubset(self.names):
            notice = (
                f"the label -1 of column {self._data.label!r} is learned as a class; drop its rows if it means none"
            )
            self._notice(notice)

    def _compare_with_head(self) -> None:
        """Notice that outputs of the model's head get other classes."""
        if self.names and self._head and set(self.names) != set(self._head) and len(self.names) == len(self._head):
            had, has = (", ".join(names[:4]) + ", …" * (len(names) > 4) for names in (self._head, self.names))
            self._notice(f"the model's head has the classes {had}; its outputs are trained as {has} in this order")

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


MARKS = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}
"""Letter in IOBES for each letter in IOBES, BILOU, BMES and BMEWO."""


def has_spans(names: Iterable[str]) -> bool:
    """Return True if tags mark spans, as `B-PER` or `I-PER` do."""
    return any(name[:2] in ("B-", "I-", "E-", "S-", "U-") for name in names)


def is_closed(names: Iterable[str]) -> bool:
    """Return True if the tags mark the end of a span, as IOBES and BILOU do."""
    return any(name[1:2] == "-" and MARKS.get(name[0]) in ("E", "S") for name in names)


def is_ended(names: Iterable[str]) -> bool:
    """Return True if the tags mark the end of a span and neither its start nor single words, as IOE1 and IOE2 do."""
    letters = {name[0] for name in names if name[1:2] == "-"}
    return letters <= {"I", "E"} and "E" in letters


def spans(tags: Sequence[str], *, closed: bool = False, ended: bool = False) -> frozenset[Span]:
    """Return the spans of tags. `closed`: the tags are of IOBES or BILOU, otherwise of IOB2 or IOB1 (`B-PER I-PER O`).

    `ended`: the tags are of IOE1 or IOE2, which are IOB1 and IOB2 read from the end. A closed span is one single tag,
    or begins, continues and ends with one kind, as in seqeval's strict mode. An open `I-` tag without a span before it
    begins a span, as in conlleval.
    """
    if ended:
        count = len(tags)
        backward = [f"B{tag[1:]}" if tag.startswith("E-") else tag for tag in reversed(tags)]
        return frozenset((kind, count - end, count - start) for kind, start, end in _open_spans(backward))
    return _closed_spans(tags) if closed else _open_spans(tags)


def _closed_spans(tags: Sequence[str]) -> frozenset[Span]:
    complete: set[Span] = set()
    kind, start = "", -1
    for number, tag in enumerate(tags):
        letter, _, name = tag.partition("-")
        mark = MARKS.get(letter, "O")
        if mark == "S":
            complete.add((name, number, number + 1))
        if mark == "B":
            kind, start = name, number
            continue
        if mark == "E" and start >= 0 and name == kind:
            complete.add((kind, start, number + 1))
        if mark != "I" or name != kind:
            start = -1
    return frozenset(complete)


def _open_spans(tags: Sequence[str]) -> frozenset[Span]:
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
