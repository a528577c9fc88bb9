"""Statistics of a data set, and the checks of a spec against them.

One pass over an uploaded file computes the statistics; the checks need no rows.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from broker.domain.errors import InvalidInput, Problem
from broker.estimator.workload import Rows
from broker.preflight.column_summary import ColumnStatistics, ColumnSummary
from trainer.contract.base import Document
from trainer.contract.data_config import DataFormat
from trainer.contract.train import TrainConfig
from trainer.dataset import cells, prompts, ratings
from trainer.dataset.example_counts import ExampleCount, count_rows
from trainer.dataset.prompts import DataError, dataset_name, fill_template
from trainer.dataset.readers import read_rows

BYTES_PER_TOKEN = 3.6
"""UTF-8 bytes per token of prose. Estimated for ASCII text; roughly right for other text."""
DENSE_BYTES_PER_TOKEN = 2.4
"""UTF-8 bytes per token of the longest row, which decides whether a job fits. Names, numbers and code need more."""


class DataSummary(Document):
    """Statistics of a data set, stored next to the file; `model_dump_json` writes them as JSON."""

    rows: int
    bytes: int
    duplicates: int
    """Number of rows that equal an earlier row."""
    columns: dict[str, ColumnSummary]
    """Columns in the file's order, including columns that only some rows have."""


class DataReport(Document):
    """Report about a data set for the user, before a purchase. Token figures are estimates: bytes / 3.6."""

    rows: int
    train_rows: int
    heldout_rows: int
    """Examples to train on and to evaluate: rows, or the answers of chats by `data.learn: split`."""
    duplicates: int
    tokens_mean: float
    tokens_written: float = 0.0
    """Part of `tokens_mean` that an encoder-decoder generates."""
    tokens_p99: float
    tokens_total: float
    """Tokens of one epoch."""
    truncated_share: float = Field(ge=0, le=1)
    """Share of rows that `max_length` truncates."""
    example_prompt: str
    example_completion: str
    labels: tuple[str, ...] = ()
    """All classes of a classification task; otherwise empty."""
    warnings: tuple[str, ...] = ()


def summarise(data: bytes | Path, fmt: DataFormat) -> DataSummary:
    """Read a whole file once, given its bytes or its path. Raises InvalidInput naming the unreadable line."""
    columns: dict[str, ColumnStatistics] = {}
    identities: set[int] = set()
    rows = 0
    try:
        for rows, row in enumerate(read_rows(data, fmt), 1):
            identities.add(prompts.row_hash(row))
            for name, value in row.items():
                statistics = columns.get(name)
                if statistics is None:
                    statistics = columns[name] = ColumnStatistics()
                statistics.add(value, rows)
    except DataError as e:
        raise _at("data", str(e)) from None
    if not rows:
        raise _at("data", "data: the file contains no row; give at least one row")
    return DataSummary(
        rows=rows,
        bytes=len(data) if isinstance(data, bytes) else data.stat().st_size,
        duplicates=rows - len(identities),
        columns={name: column.summary(rows) for name, column in columns.items()},
    )


def _at(field: str, message: str) -> InvalidInput:
    return InvalidInput(Problem(field=f"train.{field}", message=message.removeprefix(f"{field}: ")))


CHATS = {"data.prompt": "turns", **dict.fromkeys(("data.completion", "data.chosen", "data.rejected"), "chat")}
"""Kind of messages by setting. The setting's column may have it, if all answers of JUDGED tasks are messages."""
JUDGED = ("dpo", "orpo", "kto", "reward_model")


def _has_chat_answers(train: TrainConfig, summary: DataSummary) -> bool:
    """Return True if the answers of every row are lists of messages, which the trainer also requires."""
    names = [prompts.whole_column(template) or "" for _, template in _learned(train)]
    return train.task in JUDGED and all(
        n in summary.columns and "chat" not in summary.columns[n].first_unlike for n in names
    )


def _template(train: TrainConfig, field: str, template: str, summary: DataSummary) -> tuple[tuple[str, ...], int]:
    """Return (columns, bytes of literal text). Raises InvalidInput for a template that the data set cannot fill."""
    try:
        names = prompts.template_columns(template, field)
    except DataError as e:
        raise _at(field, str(e)) from None
    for name in names:
        statistics = summary.columns.get(name)
        may_be_chat = field in CHATS and name == prompts.whole_column(template) and _has_chat_answers(train, summary)
        is_chat = may_be_chat and statistics is not None and CHATS[field] not in statistics.first_unlike
        column(field, name, summary, CHATS[field] if is_chat else "text")
    return names, len(fill_template(template, dict.fromkeys(names, "")).encode())


def _check_one_step(train: TrainConfig, count: ExampleCount) -> None:
    """Raise InvalidInput if one optimizer step would use a row twice."""
    if count.training < train.global_batch_rows:
        raise _at(
            "global_batch",
            f"{count.training} training rows ({count.total} minus {count.held_out} held out) are fewer than "
            f"global_batch {train.global_batch_rows}; lower it, or give more rows",
        )


def examples_of(train: TrainConfig, summary: DataSummary) -> ExampleCount:
    """Return the numbers of examples that the trainer makes of the data set, if `max_length` cuts none."""
    chats = summary.columns.get(train.data.messages)
    if chats is None or chats.answers is None:
        return count_rows(summary.rows, train.data)
    return chats.answers.examples(train.data)


def _by_example(train: TrainConfig, summary: DataSummary) -> DataSummary:
    """Return the summary with the lengths of examples instead of the lengths of chats, if they differ."""
    chats = summary.columns.get(train.data.messages)
    if train.data.learn != "split" or chats is None or not chats.prefix_percentiles:
        return summary
    lengths = {"mean": chats.prefix_mean, "percentiles": chats.prefix_percentiles}
    columns = {**summary.columns, train.data.messages: chats.model_copy(update=lengths)}
    return summary.model_copy(update={"columns": columns})


def _lengths(summary: DataSummary, names: Sequence[str], literal: int) -> list[int]:
    """Return percentiles of a row's bytes. Adds equal percentiles of all columns, which may overestimate long rows."""
    return [literal + sum(summary.columns[n].percentiles[rank] for n in names) for rank in range(101)]


def rows_of(train: TrainConfig, summary: DataSummary) -> Rows:
    """Return the row lengths that the estimators need. Raises InvalidInput like `check`."""
    summary, count = _by_example(train, summary), examples_of(train, summary)
    all_columns = _all_columns(train, summary)
    if train.data.chosen:  # two sequences per row: the prompt with each answer
        prompt = _template(train, "data.prompt", train.data.prompt, summary)
        answers = [_template(train, field, template, summary) for field, template in _learned(train)]
        parts = [(prompt[0] + names, prompt[1] + literal) for names, literal in answers]
        mean_lengths, longest = zip(*(_tokens(summary, part) for part in parts), strict=True)
        mean_tokens = sum(mean_lengths) / len(parts)
        return Rows(count=count.total, tokens_mean=mean_tokens, tokens_longest=max(longest), sequences=len(parts))
    if train.task == "seq2seq":
        inputs, outputs = (
            _tokens(summary, _template(train, field, template, summary))
            for field, template in (("data.prompt", train.data.prompt), *_learned(train))
        )
        return Rows(
            count=count.total, tokens_mean=inputs[0], tokens_longest=inputs[1], written_mean=outputs[0],
            written_longest=outputs[1],
        )  # fmt: skip
    mean_tokens, longest_row = _tokens(summary, all_columns)
    return Rows(count=count.total, held_out=count.held_out, tokens_mean=mean_tokens, tokens_longest=longest_row)


def _tokens(summary: DataSummary, part: tuple[Sequence[str], int]) -> tuple[float, int]:
    """Return the (mean, longest) tokens of these columns together with the literal text."""
    names, literal = part
    mean = literal + sum(summary.columns[n].mean for n in names)
    longest = _lengths(summary, names, literal)[100]
    return max(1.0, mean / BYTES_PER_TOKEN), max(1, math.ceil(longest / DENSE_BYTES_PER_TOKEN))


def column(field: str, name: str, summary: DataSummary, kind: str | None = None) -> ColumnSummary:
    """Return the column that a setting names. Raises InvalidInput if it has nulls or a cell of another kind."""
    statistics = summary.columns.get(name)
    if statistics is None:
        raise _at(field, prompts.missing_column_message(name, summary.columns))
    if statistics.first_null is not None:
        raise _at(field, f"column {name!r} is null or missing in row {statistics.first_null}; fill it or drop the row")
    if kind is not None and kind in statistics.first_unlike:
        problem = cells.unlike_message(kind, name, chat_problem=statistics.chat_problem)
        raise _at(field, f"row {statistics.first_unlike[kind]}: {problem}")
    return statistics


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
    if train.task == "kto":
        _check_ratings(train, summary)
    names, literal = _template(train, "data.prompt", train.data.prompt, summary)
    for field, template in _learned(train):
        more, text = _template(train, field, template, summary)
        blank = not fill_template(template, dict.fromkeys(more, "")).strip()
        if blank and all(summary.columns[n].empty == summary.rows for n in more):
            raise _at(field, "is empty in every row, so there is nothing to learn; name a column with text")
        names, literal = names + more, literal + text
    return names, literal


def _learned(train: TrainConfig) -> list[tuple[str, str]]:
    """Return (field, template) of the texts that the model learns to write."""
    settings = ("chosen", "rejected") if train.data.chosen else ("completion",)
    if train.task == "text_to_image":
        return []
    return [(f"data.{name}", getattr(train.data, name)) for name in settings]


def _check_ratings(train: TrainConfig, summary: DataSummary) -> None:
    """Raise InvalidInput for ratings that are neither true nor false, or all equal, and for steps of one answer."""
    values = column("data.label", train.data.label, summary, "flag").values or {}
    flags = {cells.flag(text) for text in values}
    if len(flags) == 1:
        raise _at("data.label", ratings.one_sided_message(train.data.label, good=flags == {True}))
    if train.global_batch == 1:
        raise _at("global_batch", ratings.LONE_ANSWER)


LABEL = {
    "text_classification": "label",
    "text_regression": "number",
    "token_classification": "tags",
    "image_classification": "label",
}
"""Kind of the cells of `data.label`, by task."""


def _labels(train: TrainConfig, summary: DataSummary) -> tuple[str, ...]:
    """Return the classes. Raises InvalidInput for a column that cannot be learned or a row with an unlisted class."""
    if train.task not in LABEL:
        return ()
    kind = LABEL[train.task]
    statistics = column("data.label", train.data.label, summary, kind)
    if kind == "number":
        return ()
    if statistics.values is None:
        if kind == "tags":  # too many tags: the trainer checks them before its first step
            return train.data.labels
        problem = f"column {train.data.label!r} has more than {cells.MAX_LABELS} labels"
        raise _at("data.label", f"{problem}; name a column of classes")
    first: dict[str, int] = {}
    for text, row in statistics.values.items():
        for label in (cells.tags(text) or ()) if kind == "tags" else (text,):
            first.setdefault(cells.named(label, train.data.labels), row)
    if not train.data.labels:
        if wrong := cells.label_set_problem(sorted(first), train.data.label):
            raise _at("data.label", wrong)
        return cells.sorted_labels(first)
    if unknown := next((label for label in first if label not in train.data.labels), None):
        problem = cells.unknown_label_message(unknown, train.data.labels)
        raise _at("data.labels", f"{dataset_name(train.data.path)} row {first[unknown]}: {problem}")
    return train.data.labels


def _example(train: TrainConfig, summary: DataSummary) -> str:
    """Return the input of one row if the input is a column; otherwise an empty text."""
    name = train.data.words or (train.data.image if train.task in LABEL else "")
    return summary.columns[name].example if name else ""


def _target(train: TrainConfig, summary: DataSummary, examples: dict[str, str]) -> str:
    """Return the learned output of one row."""
    name = train.data.messages or (train.data.label if train.task in LABEL else "") or train.data.image
    return summary.columns[name].example if name else fill_template(_learned(train)[0][1], examples)


def check(train: TrainConfig, summary: DataSummary) -> DataReport:
    """Check a spec against a data set. Raises InvalidInput naming the field and the fix."""
    summary, count = _by_example(train, summary), examples_of(train, summary)
    names, literal = _all_columns(train, summary)
    if not count.total:
        raise _at(
            "data.messages", f"every answer that data.learn: {train.data.learn} selects is muted; remove weight: 0"
        )
    _check_one_step(train, count)
    lengths = _lengths(summary, names, literal)
    limit = train.max_length * BYTES_PER_TOKEN
    tokens_mean = (literal + sum(summary.columns[n].mean for n in names)) / BYTES_PER_TOKEN
    examples = {n: summary.columns[n].example for n in names}
    truncated = sum(length > limit for length in lengths[1:]) / 100
    return DataReport(
        rows=summary.rows,
        train_rows=count.training,
        heldout_rows=count.held_out,
        duplicates=summary.duplicates,
        tokens_mean=tokens_mean,
        tokens_written=rows_of(train, summary).written_mean,
        tokens_p99=lengths[99] / BYTES_PER_TOKEN,
        tokens_total=tokens_mean * count.total,
        truncated_share=truncated,
        example_prompt=_example(train, summary) or fill_template(train.data.prompt, examples),
        example_completion=_target(train, summary, examples),
        labels=_labels(train, summary),
        warnings=_warnings(train, summary, truncated, count),
    )


def _warnings(train: TrainConfig, summary: DataSummary, truncated: float, count: ExampleCount) -> tuple[str, ...]:
    warnings = []
    if count.total != summary.rows:
        warnings.append(f"data.learn {train.data.learn}: {summary.rows} chats give {count.total} examples to learn")
    if truncated >= 0.01:
        share = f"about {truncated:.0%} of the rows"
        warnings.append(f"{share} are longer than max_length {train.max_length} and will be truncated")
    if summary.duplicates:
        warnings.append(f"{summary.duplicates} rows are duplicates and may be in both the training and held-out part")
    for name in (n for field, template in _learned(train) for n in prompts.template_columns(template, field)):
        if summary.columns[name].empty:
            warnings.append(f"column {name!r} is empty in {summary.columns[name].empty} rows")
    if LABEL.get(train.task) == "label" and (values := summary.columns[train.data.label].values):
        warnings += filter(None, [cells.many_labels_warning(len(values), summary.rows, train.data.label)])
    if train.task == "kto" and (good := summary.columns[train.data.label].good):
        warnings += filter(None, [ratings.unbalanced_message(train.kto, good, summary.rows - good)])
    if not count.held_out:
        warnings.append("no row is held out, so the job cannot show whether the model improved")
    return tuple(warnings)
