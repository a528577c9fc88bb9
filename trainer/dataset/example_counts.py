"""Counts the examples of a data set: the same rules before a purchase and in training.

A row is one example. With `data.learn: split`, a chat has one example for each answer with loss. Chats are held out as
a whole, so that no held-out answer shares its chat with a trained answer.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.base import Document, Number
from trainer.contract.data_config import DataConfig, DataFormat
from trainer.dataset import chats
from trainer.dataset.chats import BadChat, Chat
from trainer.dataset.prompts import DataError, held_out
from trainer.dataset.readers import each_row


@dataclass(frozen=True, kw_only=True)
class ExampleCount:
    """Examples of a data set."""

    training: int
    held_out: int

    @property
    def total(self) -> int:
        """Number of all examples."""
        return self.training + self.held_out


class AnswerCounts(Document):
    """Answers of the chats in a column."""

    chats: tuple[tuple[Number, Number], ...]
    """Pairs: a number of answers with loss in a chat, and the number of such chats; in ascending order."""
    muted_last: Number = 0
    """Number of chats whose last answer has no loss."""

    @property
    def answers(self) -> int:
        """Number of all answers with loss."""
        return sum(answers * chats for answers, chats in self.chats)

    def examples(self, data: DataConfig) -> ExampleCount:
        """Return the number of examples with a target, if `max_length` cuts none of them."""
        chats = dict(self.chats)
        if data.learn == "split":
            return count_chats(chats, data.eval_share)
        return count_rows(sum(chats.values()) - (self.muted_last if data.learn == "last" else chats.get(0, 0)), data)


class AnswerCounter:
    """Running count of the answers of chats."""

    def __init__(self) -> None:
        self._chats: Counter[int] = Counter()
        self._muted_last = 0

    def add(self, chat: Chat) -> None:
        """Count the answers of a chat."""
        self._chats[len(chat.learned)] += 1
        self._muted_last += chat.last_answer in chat.muted

    def counts(self) -> AnswerCounts:
        """Return the counts so far."""
        return AnswerCounts(chats=tuple(sorted(self._chats.items())), muted_last=self._muted_last)


def count_file(path: Path, data_format: DataFormat, data: DataConfig) -> ExampleCount:
    """Return the counts of a file; an unreadable row counts as one example. Raises: DataError."""
    counter, others = AnswerCounter(), 0
    for row in each_row(path, data_format, data.path):
        try:
            if isinstance(row, DataError) or not data.messages:
                raise BadChat
            counter.add(chats.parse(row.get(data.messages)))
        except BadChat:
            others += 1
    counts = counter.counts()
    return counts.examples(data) if counts.chats else count_rows(others, data)


def count_summary(summary: Mapping[str, Any], data: DataConfig) -> ExampleCount:
    """Return the counts of an upload. `summary`: JSON of a `broker.preflight.dataset.DataSummary`."""
    answers = summary.get("columns", {}).get(data.messages, {}).get("answers")
    return count_rows(summary["rows"], data) if answers is None else AnswerCounts(**answers).examples(data)


def count_rows(rows: int, data: DataConfig) -> ExampleCount:
    """Return the counts of a data set with one example per row."""
    heldout_rows = held_out(rows, data.eval_share)
    return ExampleCount(training=rows - heldout_rows, held_out=heldout_rows)


def count_chats(chats: Mapping[int, int], share: float) -> ExampleCount:
    """Return the counts of a data set with several examples per chat. `chats`: see `held_out_chats`."""
    heldout_examples = sum(size * count for size, count in held_out_chats(chats, share).items())
    return ExampleCount(
        training=sum(size * count for size, count in chats.items()) - heldout_examples, held_out=heldout_examples
    )


def held_out_chats(chats: Mapping[int, int], share: float) -> dict[int, int]:
    """Return the number of held-out chats by size. A chat's size is its number of examples; `chats`: all chats by size.

    Chats of each size are held out in proportion. So the number of held-out examples does not depend on the seed, and
    the daemon computes this number without the order of the rows.
    """
    total = sum(count for size, count in chats.items() if size)
    heldout_rows, below, result = held_out(total, share), 0, {}
    for size in sorted(filter(None, chats), reverse=True):
        above = below + chats[size]
        result[size] = heldout_rows * above // total - heldout_rows * below // total
        below = above
    return result
