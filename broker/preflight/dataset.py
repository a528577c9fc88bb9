"""A data set in numbers: one pass when it is uploaded, then every check of a spec against it without the rows."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from broker.domain.errors import InvalidInput, Problem
from broker.estimator.workload import Rows
from trainer.contract.base import Document
from trainer.contract.train import DataFormat, TrainConfig
from trainer.dataset import cells
from trainer.dataset.prompts import (
    DataError,
    fill,
    held_out,
    identity,
    lacking,
    source,
    template_columns,
    whole_column,
)
from trainer.dataset.readers import read_rows

BYTES_PER_TOKEN = 3.6
"""UTF-8 bytes per token of prose, an estimate; it stands for characters in ASCII text and holds roughly elsewhere."""
DENSE_BYTES_PER_TOKEN = 2.4
"""For the longest row, which decides whether it fits: names, numbers and code take more tokens."""
EXAMPLE_CELL = 400
LONGEST_LABEL = 256


class ColumnSummary(Document):
    """One column; lengths are UTF-8 bytes of the cell as a template renders it."""

    mean: float
    percentiles: tuple[int, ...]
    """Lengths at 0 %, 1 %, ... 100 % of the rows."""
    empty: int
    """Cells without a visible character."""
    first_null: int | None = None
    """Number of the first row (from 1) whose cell is null or missing."""
    first_unlike: dict[str, int] = Field(default_factory=dict)
    """Number of the first row whose cell is not of a kind, by kind (`trainer.dataset.cells.KINDS`)."""
    values: dict[str, int] | None = None
    """Number of the first row of each different cell, or word of a list; None where they are too many for labels."""
    example: str = ""

    @property
    def p99(self) -> int:
        return self.percentiles[99]

    @property
    def longest(self) -> int:
        return self.percentiles[100]


class DataSummary(Document):
    """What is kept of a data set beside the file itself; JSON by `model_dump_json`."""

    rows: int
    bytes: int
    duplicates: int
    """Rows that equal an earlier one."""
    columns: dict[str, ColumnSummary]
    """In the file's order; a column that only some rows have is among them."""


class DataReport(Document):
    """For people, before they buy. Token figures are estimates: bytes / 3.6."""

    rows: int
    train_rows: int
    heldout_rows: int
    duplicates: int
    tokens_mean: float
    tokens_written: float = 0.0
    """Of these, what an encoder-decoder writes."""
    tokens_p99: float
    tokens_total: float
    """One epoch."""
    truncated_share: float = Field(ge=0, le=1)
    """Share of rows that `max_length` cuts."""
    example_prompt: str
    example_completion: str
    labels: tuple[str, ...] = ()
    """All classes, for a task that tells some apart."""
    warnings: tuple[str, ...] = ()


class _Column:
    """Running statistics of one column: lengths counted by value, so memory is bounded by the distinct lengths."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self.seen = 0
        self.empty = 0
        self.first_null: int | None = None
        self.first_unlike: dict[str, int] = {}
        self.values: dict[str, int] | None = {}
        self.example = ""

    def add(self, value: Any, number: int) -> None:
        text = "" if value is None else str(value)
        if self.first_null is None and (value is None or self.seen < number - 1):
            self.first_null = self.seen + 1
        for kind in cells.KINDS:
            if kind not in self.first_unlike and value is not None and not cells.is_a(kind, value):
                self.first_unlike[kind] = number
        if self.values is not None:
            self._note(value, number)
        self.seen += 1
        self.lengths[len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))] += 1
        if not text.strip():
            self.empty += 1
        elif not self.example:
            self.example = text[:EXAMPLE_CELL]

    def _note(self, value: Any, number: int) -> None:
        assert self.values is not None
        for part in value if isinstance(value, list) else (value,):
            text = cells.label(part)
            if text is not None:
                self.values.setdefault(text, number)
            if len(self.values) > cells.MOST_LABELS or len(text or "") > LONGEST_LABEL:
                self.values = None
                return

    def summary(self, rows: int) -> ColumnSummary:
        if self.first_null is None and self.seen < rows:
            self.first_null = self.seen + 1
        self.lengths[0] += rows - self.seen
        mean = sum(length * count for length, count in self.lengths.items()) / rows
        return ColumnSummary(
            mean=mean,
            percentiles=_percentiles(self.lengths, rows),
            empty=self.empty + rows - self.seen,
            first_null=self.first_null,
            first_unlike=self.first_unlike,
            values=self.values,
            example=self.example,
        )


def _percentiles(lengths: Counter[int], rows: int) -> tuple[int, ...]:
    """Nearest-rank percentiles 0..100, in whole numbers: 7 / 100 * 100 is more than 7."""
    found: list[int] = []
    below = 0
    for length in sorted(lengths):
        below += lengths[length]
        while len(found) <= 100 and max(1, -(-len(found) * rows // 100)) <= below:
            found.append(length)
    return tuple(found)


def summarise(data: bytes | Path, fmt: DataFormat) -> DataSummary:
    """One pass over a whole file, by its bytes or its path. Raises InvalidInput naming the line that cannot be read."""
    columns: dict[str, _Column] = {}
    seen: set[int] = set()
    rows = 0
    try:
        for rows, row in enumerate(read_rows(data, fmt), 1):
            seen.add(identity(row))
            for name, value in row.items():
                known = columns.get(name)
                if known is None:
                    known = columns[name] = _Column()
                known.add(value, rows)
    except DataError as e:
        raise _at("data", str(e)) from None
    if not rows:
        raise _at("data", "data: the file has a header or an empty list but no row; give at least one row")
    return DataSummary(
        rows=rows,
        bytes=len(data) if isinstance(data, bytes) else data.stat().st_size,
        duplicates=rows - len(seen),
        columns={name: column.summary(rows) for name, column in columns.items()},
    )


def _at(field: str, message: str) -> InvalidInput:
    return InvalidInput(Problem(field=f"train.{field}", message=message.removeprefix(f"{field}: ")))


CHATS = {"data.prompt": "turns", "data.chosen": "chat", "data.rejected": "chat"}
"""Settings whose column may hold messages in the place of text, of preferences whose answers do."""


def _chats(train: TrainConfig, summary: DataSummary) -> bool:
    """Whether both answers of every row are lists of messages, as the trainer asks before it reads any as such."""
    names = [whole_column(template) or "" for template in (train.data.chosen, train.data.rejected)]
    return all(n in summary.columns and "chat" not in summary.columns[n].first_unlike for n in names)


def _template(train: TrainConfig, field: str, template: str, summary: DataSummary) -> tuple[tuple[str, ...], int]:
    """(columns, bytes of literal text). Raises InvalidInput for a template that this data set cannot fill."""
    try:
        names = template_columns(template, field)
    except DataError as e:
        raise _at(field, str(e)) from None
    for name in names:
        found = summary.columns.get(name)
        chats = field in CHATS and name == whole_column(template) and _chats(train, summary)
        messages = chats and found is not None and CHATS[field] not in found.first_unlike
        column(field, name, summary, CHATS[field] if messages else "text")
    return names, len(fill(template, dict.fromkeys(names, "")).encode())


def _split(train: TrainConfig, rows: int) -> tuple[int, int]:
    """(training, held-out) rows. Raises InvalidInput when one optimizer step would see rows twice."""
    held = held_out(rows, train.data.eval_share)
    if rows - held < train.rows_a_step:
        raise _at(
            "global_batch",
            f"{rows - held} rows to train on ({rows} less {held} held out) are fewer than global_batch "
            f"{train.rows_a_step}; lower it, or give more rows",
        )
    return rows - held, held


def _lengths(summary: DataSummary, names: Sequence[str], literal: int) -> list[int]:
    """Percentiles of a row's bytes; columns are added rank by rank, so the long tail is not underestimated."""
    return [literal + sum(summary.columns[n].percentiles[rank] for n in names) for rank in range(101)]


def rows_of(train: TrainConfig, summary: DataSummary) -> Rows:
    """What the estimators need. Raises InvalidInput as `check`."""
    whole = _all_columns(train, summary)
    if train.data.chosen:  # two sequences, each the prompt with an answer
        prompt = _template(train, "data.prompt", train.data.prompt, summary)
        answers = [_template(train, field, template, summary) for field, template in _learned(train)]
        parts = [(prompt[0] + names, prompt[1] + literal) for names, literal in answers]
        means, longest = zip(*(_tokens(summary, part) for part in parts), strict=True)
        mean = sum(means) / len(parts)
        return Rows(count=summary.rows, tokens_mean=mean, tokens_longest=max(longest), sequences=len(parts))
    if train.task == "seq2seq":
        read, written = (
            _tokens(summary, _template(train, field, template, summary))
            for field, template in (("data.prompt", train.data.prompt), *_learned(train))
        )
        return Rows(
            count=summary.rows, tokens_mean=read[0], tokens_longest=read[1], written_mean=written[0],
            written_longest=written[1],
        )  # fmt: skip
    mean, most = _tokens(summary, whole)
    return Rows(count=summary.rows, tokens_mean=mean, tokens_longest=most)


def _tokens(summary: DataSummary, part: tuple[Sequence[str], int]) -> tuple[float, int]:
    """(mean, longest) of what these columns and so much literal text make."""
    names, literal = part
    mean = literal + sum(summary.columns[n].mean for n in names)
    longest = _lengths(summary, names, literal)[100]
    return max(1.0, mean / BYTES_PER_TOKEN), max(1, math.ceil(longest / DENSE_BYTES_PER_TOKEN))


def column(field: str, name: str, summary: DataSummary, kind: str | None = None) -> ColumnSummary:
    """A column that a setting names, of a kind in every row. Raises InvalidInput."""
    found = summary.columns.get(name)
    if found is None:
        raise _at(field, lacking(name, summary.columns))
    if found.first_null is not None:
        raise _at(field, f"column {name!r} is null or missing in row {found.first_null}; fill it or drop the row")
    if kind is not None and kind in found.first_unlike:
        raise _at(field, f"row {found.first_unlike[kind]}: {cells.missing(kind, name)}")
    return found


def _all_columns(train: TrainConfig, summary: DataSummary) -> tuple[tuple[str, ...], int]:
    if train.data.messages:
        column("data.messages", train.data.messages, summary, "chat")
        return (train.data.messages,), 0
    if train.task in LABEL:
        _labels(train, summary)
        if train.data.words:
            column("data.words", train.data.words, summary, "words")
            return (train.data.words,), 0
        if train.data.image:
            column("data.image", train.data.image, summary, "picture")
            return (), 0
        return _template(train, "data.prompt", train.data.prompt, summary)
    if train.data.image:
        column("data.image", train.data.image, summary, "picture")
    names, literal = _template(train, "data.prompt", train.data.prompt, summary)
    for field, template in _learned(train):
        more, text = _template(train, field, template, summary)
        blank = not fill(template, dict.fromkeys(more, "")).strip()
        if blank and all(summary.columns[n].empty == summary.rows for n in more):
            raise _at(field, "is empty in every row, so there is nothing to learn; name a column with text")
        names, literal = names + more, literal + text
    return names, literal


def _learned(train: TrainConfig) -> list[tuple[str, str]]:
    """(field, template) of what the model learns to write."""
    settings = ("chosen", "rejected") if train.task in ("dpo", "reward_model") else ("completion",)
    if train.task == "text_to_image":
        return []
    return [(f"data.{name}", getattr(train.data, name)) for name in settings]


LABEL = {
    "text_classification": "label",
    "text_regression": "number",
    "token_classification": "words",
    "image_classification": "label",
}
"""What a cell of `data.label` is, by task."""


def _labels(train: TrainConfig, summary: DataSummary) -> tuple[str, ...]:
    """The classes. Raises InvalidInput for a column that cannot be learned, and a row with a class of its own."""
    if train.task not in LABEL:
        return ()
    kind = LABEL[train.task]
    found = column("data.label", train.data.label, summary, kind)
    if kind == "number":
        return ()
    if found.values is None and kind == "words":  # texts of many tags: the trainer finds them before its first step
        return train.data.labels
    if found.values is None:
        raise _at("data.label", f"column {train.data.label!r} has more than {cells.MOST_LABELS} labels; is it classes?")
    first: dict[str, int] = {}
    for text, row in found.values.items():
        for label in text.split() if kind == "words" else (text,):
            first.setdefault(label, row)
    if not train.data.labels:
        if wrong := cells.bad_set(sorted(first), train.data.label):
            raise _at("data.label", wrong)
        return tuple(sorted(first))
    for label, row in first.items():
        if label not in train.data.labels:
            raise _at("data.labels", f"{source(train.data.path)} row {row}: {cells.outside(label, train.data.labels)}")
    return train.data.labels


def _example(train: TrainConfig, summary: DataSummary) -> str:
    """What is read of one row, where it is a column."""
    name = train.data.words or (train.data.image if train.task in LABEL else "")
    return summary.columns[name].example if name else ""


def _target(train: TrainConfig, summary: DataSummary, examples: dict[str, str]) -> str:
    """What is learned of one row."""
    name = train.data.messages or train.data.label or train.data.image
    return summary.columns[name].example if name else fill(_learned(train)[0][1], examples)


def check(train: TrainConfig, summary: DataSummary) -> DataReport:
    """A spec against a data set. Raises InvalidInput naming the field and the fix."""
    names, literal = _all_columns(train, summary)
    train_rows, held = _split(train, summary.rows)
    lengths = _lengths(summary, names, literal)
    limit = train.max_length * BYTES_PER_TOKEN
    tokens_mean = (literal + sum(summary.columns[n].mean for n in names)) / BYTES_PER_TOKEN
    examples = {n: summary.columns[n].example for n in names}
    truncated = sum(length > limit for length in lengths[1:]) / 100
    return DataReport(
        rows=summary.rows,
        train_rows=train_rows,
        heldout_rows=held,
        duplicates=summary.duplicates,
        tokens_mean=tokens_mean,
        tokens_written=rows_of(train, summary).written_mean,
        tokens_p99=lengths[99] / BYTES_PER_TOKEN,
        tokens_total=tokens_mean * summary.rows,
        truncated_share=truncated,
        example_prompt=_example(train, summary) or fill(train.data.prompt, examples),
        example_completion=_target(train, summary, examples),
        labels=_labels(train, summary),
        warnings=_warnings(train, summary, truncated, held),
    )


def _warnings(train: TrainConfig, summary: DataSummary, truncated: float, held: int) -> tuple[str, ...]:
    found = []
    if truncated >= 0.01:
        found.append(f"about {truncated:.0%} of the rows are longer than max_length {train.max_length} and will be cut")
    if summary.duplicates:
        found.append(f"{summary.duplicates} rows repeat an earlier one; they may be in the training and held-out part")
    for name in (n for field, template in _learned(train) for n in template_columns(template, field)):
        if summary.columns[name].empty:
            found.append(f"column {name!r} is empty in {summary.columns[name].empty} rows")
    if LABEL.get(train.task) == "label" and (values := summary.columns[train.data.label].values):
        found += filter(None, [cells.hardly_classes(len(values), summary.rows, train.data.label)])
    if not held:
        found.append("no row is held out, so the end cannot say whether the model got better")
    return tuple(found)
