"""Statistics of one column of a data set, for `broker.preflight.dataset`."""

from collections import Counter
from typing import Any

from pydantic import Field

from trainer.contract.base import Document
from trainer.dataset import cells, chats
from trainer.dataset.chats import BadChat, Chat
from trainer.dataset.example_counts import AnswerCounter, AnswerCounts

EXAMPLE_CELL = 400
LONGEST_LABEL = 256
CHAT_KINDS = ("chat", "turns")
"""Kinds of `cells.KINDS` that are lists of messages."""


class ColumnSummary(Document):
    """Statistics of one column. Lengths are UTF-8 bytes of a cell as a template renders it."""

    mean: float
    percentiles: tuple[int, ...]
    """Lengths at 0 %, 1 %, ... 100 % of the rows."""
    empty: int
    """Number of cells without a visible character."""
    first_null: int | None = None
    """Number of the first row (from 1) whose cell is null or missing; None if there is none."""
    first_unlike: dict[str, int] = Field(default_factory=dict)
    """Number of the first row whose cell is not of the kind, for each kind of `trainer.dataset.cells.KINDS`."""
    chat_problem: str = ""
    """Problem of the first cell that is not a chat, and the fix; empty if all are chats."""
    values: dict[str, int] | None = None
    """Number of the first row with each distinct cell, or element of a list; None if there are too many for labels."""
    good: int = 0
    """Number of cells that a rating reads as true."""
    answers: AnswerCounts | None = None
    """Answers of the chats in the column; None if a cell is not a chat."""
    prefix_mean: float = 0.0
    prefix_percentiles: tuple[int, ...] = ()
    """Lengths of the chats up to each answer with loss, which are the examples of `data.learn: split`."""
    example: str = ""

    @property
    def p99(self) -> int:
        return self.percentiles[99]

    @property
    def longest(self) -> int:
        return self.percentiles[100]


class ColumnStatistics:
    """Running statistics of one column. Rows are counted by length, so memory grows only with the distinct lengths."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self.count = 0
        self.empty = 0
        self.first_null: int | None = None
        self.first_unlike: dict[str, int] = {}
        self.chat_problem = ""
        self._answers = AnswerCounter()
        self._prefixes: Counter[int] = Counter()
        self.good = 0
        self.values: dict[str, int] | None = {}
        self.example = ""

    def add(self, value: Any, number: int) -> None:
        text = "" if value is None else str(value)
        if self.first_null is None and (value is None or self.count < number - 1):
            self.first_null = self.count + 1
        if value is not None:
            self._add_kinds(value, number)
        if self.values is not None:
            self._add_values(value, number)
        self.count += 1
        self.lengths[_bytes(text)] += 1
        if not text.strip():
            self.empty += 1
        elif not self.example:
            self.example = text[:EXAMPLE_CELL]

    def _add_kinds(self, value: Any, number: int) -> None:
        """Record the kinds that the cell does not have. A chat is parsed once."""
        for kind in cells.KINDS:
            if kind not in CHAT_KINDS and kind not in self.first_unlike and not cells.is_a(kind, value):
                self.first_unlike[kind] = number
        if "flag" not in self.first_unlike:
            self.good += cells.flag(value) is True
        if self.first_unlike.keys() >= set(CHAT_KINDS):
            return
        try:
            chat = chats.parse(value)
        except BadChat as e:
            self.first_unlike.setdefault("turns", number)
            self._add_problem(str(e), number)
            return
        if chat.last_answer < 0:
            self._add_problem(cells.NO_ANSWER, number)
        elif "chat" not in self.first_unlike:
            self._add_chat(chat)

    def _add_problem(self, problem: str, number: int) -> None:
        """Record the first cell that is not a chat."""
        if "chat" not in self.first_unlike:
            self.first_unlike["chat"], self.chat_problem = number, problem

    def _add_chat(self, chat: Chat) -> None:
        """Count the answers of a chat, and measure the chat's length up to each answer."""
        self._answers.add(chat)
        learned, length = set(chat.learned), 0
        for index, message in enumerate(chat.messages):
            length += _bytes(str(message)) + len(", ")
            if index in learned:
                self._prefixes[length] += 1

    def _add_values(self, value: Any, number: int) -> None:
        assert self.values is not None
        for part in value if isinstance(value, list) else (value,):
            text = cells.label(part)
            if text is not None:
                self.values.setdefault(text, number)
            if len(self.values) > cells.MAX_LABELS or len(text or "") > LONGEST_LABEL:
                self.values = None
                return

    def summary(self, rows: int) -> ColumnSummary:
        if self.first_null is None and self.count < rows:
            self.first_null = self.count + 1
        self.lengths[0] += rows - self.count
        has_chats = "chat" not in self.first_unlike and self.first_null is None
        return ColumnSummary(
            mean=_mean_length(self.lengths),
            percentiles=_percentiles(self.lengths, rows),
            empty=self.empty + rows - self.count,
            first_null=self.first_null,
            first_unlike=self.first_unlike,
            chat_problem=self.chat_problem,
            good=self.good,
            values=self.values,
            answers=self._answers.counts() if has_chats else None,
            prefix_mean=_mean_length(self._prefixes) if has_chats else 0.0,
            prefix_percentiles=_percentiles(self._prefixes, self._prefixes.total()) if has_chats else (),
            example=self.example,
        )


def _bytes(text: str) -> int:
    """Return the UTF-8 bytes of a text."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _mean_length(lengths: Counter[int]) -> float:
    return sum(length * count for length, count in lengths.items()) / max(1, lengths.total())


def _percentiles(lengths: Counter[int], rows: int) -> tuple[int, ...]:
    """Return nearest-rank percentiles 0..100. Uses integers, because in floats 7 / 100 * 100 is more than 7."""
    percentiles: list[int] = []
    below = 0
    for length in sorted(lengths):
        below += lengths[length]
        while len(percentiles) <= 100 and max(1, -(-len(percentiles) * rows // 100)) <= below:
            percentiles.append(length)
    return tuple(percentiles)
