"""Checks before a purchase: `python -m trainer.preflight SPEC [--json]`.

The training's own code reads, renders, tokenises and collates the rows on this machine, with the model's own tokenizer.
The first, the longest and three random rows pass through the model on the meta device; no weights are read.
SPEC is a job's spec, or a `TrainConfig`; its dataset is a file on this machine.
"""

import argparse
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer import tasks
from trainer.batching import sampler
from trainer.contract.data_config import model_files
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.core.config_file import BadConfig, read_config
from trainer.core.errors import Fault, UserFault
from trainer.dataset import batch_defaults, cells, chats, sources
from trainer.dataset.example_counts import AnswerCounter, ExampleCount, count_rows
from trainer.dataset.prompts import DataError, fill_template, row_hash
from trainer.models import availability, remote_code
from trainer.optim import learning_rates
from trainer.tasks.common import forward_check
from trainer.tasks.common.row_sample import RowSample
from trainer.tasks.common.task import Task

UNCUT = 1_048_576
"""Value of `max_length`, in tokens, at which no row is cut."""
RENDERED_ROWS = 3
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class RenderedRow:
    """Row as the model receives it, with special tokens, cut to `max_length`."""

    row: int
    text: str
    learned: str
    """Text that carries loss: a completion, the assistant's turns, a class."""


@dataclass(kw_only=True)
class PreflightReport:
    """Result of the checks, as far as they got."""

    spec: str
    code: int = 0
    """Exit code."""
    problem: str | None = None
    """Reason why training is impossible, in one line; None: possible."""
    model: str = ""
    """Folder or id of the model."""
    rows: int = 0
    bad_rows: int = 0
    """Rows that are unreadable or lack what the task needs."""
    bad: list[str] = field(default_factory=list)
    """Problems of the first bad rows."""
    empty_rows: int = 0
    """Rows with an empty input or target."""
    duplicates: int = 0
    """Rows that equal an earlier row."""
    equal_pairs: int = 0
    """Rows with two equal answers, from which nothing is learned."""
    dropped_rows: int = 0
    """Rows with nothing left to learn within `max_length`."""
    train_rows: int = 0
    heldout_rows: int = 0
    steps: int = 0
    settled: str = ""
    """Values chosen for `auto`: the global batch and its source."""
    max_length: int = 0
    lengths: dict[str, float] = field(default_factory=dict)
    """Tokens of a row's longest sequence before truncation: min, mean, p50 to p99, max."""
    truncated_rows: int = 0
    truncated_share: float = 0.0
    tokens_per_epoch: int = 0
    """Tokens of all rows after truncation."""
    labels: dict[str, int] = field(default_factory=dict)
    """Count of each class or tag."""
    rendered: list[RenderedRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class _RowStatistics:
    """Observer that counts and measures every usable row."""

    def __init__(self, train: TrainConfig, task: Task[Any]) -> None:
        self._train, self._task = train, task
        self._uncut = tasks.build_task(train.model_copy(update={"max_length": UNCUT}))
        self._row_ids: set[int] = set()
        self.lengths: Counter[int] = Counter()
        self.labels: Counter[str] = Counter()
        self._answers = AnswerCounter()
        self.tokens = self.empty = self.duplicates = self.equal = 0
        self.rendered: list[RenderedRow] = []
        self._number = self._part = 0
        self.sample = RowSample(train.seed)

    def __call__(self, number: int, row: dict[str, Any], parsed: Any) -> None:
        self._part = self._part + 1 if number == self._number else 0
        self._measure(number, row, parsed)
        if number == self._number:  # another example of the same row
            return
        self._number = number
        self.empty += self._blank(row)
        self.equal += self._equal(row)
        self.labels.update(_labels(self._train, row))
        row_id = row_hash(row)
        self.duplicates += row_id in self._row_ids
        self._row_ids.add(row_id)
        if len(self.rendered) < RENDERED_ROWS:
            text, learned = self._task.samples.describe(parsed)
            self.rendered.append(RenderedRow(row=number, text=text, learned=learned))

    def _measure(self, number: int, row: dict[str, Any], parsed: Any) -> None:
        data, uncut = self._task.data, self._uncut.data
        lengths = data.lengths(parsed)
        self.sample.offer(number, parsed, max(lengths, default=0))
        if not lengths:
            return
        length = max(lengths)
        if data.truncates and length >= data.limit:  # it may be truncated
            uncut.tokenizer = data.tokenizer
            full_row = uncut.parse_row(row, number)
            length = max(uncut.lengths(full_row[self._part] if isinstance(full_row, list) else full_row))
        self.lengths[length] += 1
        self.tokens += data.size(parsed) if data.truncates else min(length, data.limit)

    def count(self, rows: int) -> ExampleCount:
        """Return the examples before `max_length` cuts any, as the daemon counts them. `rows`: rows of the file."""
        data = self._train.data
        return self._answers.counts().examples(data) if data.messages else count_rows(rows, data)

    def _blank(self, row: dict[str, Any]) -> bool:
        data = self._train.data
        if data.messages:
            chat = chats.parse(row[data.messages])
            self._answers.add(chat)
            answers = [m for m in chat.messages if m["role"] == "assistant" and "tool_calls" not in m]
            return not all(message["content"].strip() for message in answers)
        templates = (data.prompt, data.completion, data.chosen, data.rejected)
        return any(template and not fill_template(template, row).strip() for template in templates)

    def _equal(self, row: dict[str, Any]) -> bool:
        data = self._train.data
        return bool(data.chosen) and fill_template(data.chosen, row) == fill_template(data.rejected, row)


def _labels(train: TrainConfig, row: dict[str, Any]) -> list[str]:
    match train.task:
        case "text_classification" | "image_classification":
            return [cells.named(cells.label(row[train.data.label]) or "", train.data.labels)]
        case "token_classification":
            return [cells.named(tag, train.data.labels) for tag in cells.tags(row[train.data.label]) or []]
    return []


def check(spec: Path, *, trusted: bool = False) -> PreflightReport:
    """Run all checks; the report also holds the problems. `trusted`: the model's own code may run here."""
    report = PreflightReport(spec=str(spec))
    try:
        _check(spec, report, trusted)
    except (BadConfig, OSError) as e:
        report.code, report.problem = ExitCode.USER_ERROR, str(e)
    except DataError as e:
        is_unreachable = isinstance(e, sources.Unreachable)
        report.code, report.problem = ExitCode.INFRASTRUCTURE if is_unreachable else ExitCode.DATA, str(e)
    except Fault as e:
        report.code, report.problem = e.code, str(e)
    return report


def _check(spec: Path, report: PreflightReport, trusted: bool) -> None:
    train = read_config(spec)
    if problem := remote_code.permission_problem(train, flag=trusted):
        raise BadConfig(problem)
    if train.data.path.startswith("upload:"):
        raise BadConfig("data.path: an upload is the daemon's; give the file")
    report.max_length = train.max_length
    report.model = availability.check_model_available(train.model, model_files(train.task), revision=train.revision)
    task = tasks.build_task(train)
    statistics = _RowStatistics(train, task)
    try:
        with sources.readable(train.data, spec.parent) as dataset:
            examples, report.dropped_rows = task.examples(dataset.path, dataset.format, statistics)
    finally:
        _fill_report(report, task, statistics)
    training, held_out = sampler.split(train.seed, len(examples), train.data.eval_share, task.data.chats)
    report.train_rows, report.heldout_rows = len(training), len(held_out)
    train, report.settled = batch_defaults.resolve_global_batch(train, statistics.count(report.rows))
    report.steps = learning_rates.total_steps(train, len(training))
    report.warnings += _warnings(train, report, task.data.reader.notice_lines())
    sampler.check_rows_per_step(len(training), train.global_batch_rows)
    report.warnings += _check_model(task, train, statistics.sample)


def _fill_report(report: PreflightReport, task: Task[Any], statistics: _RowStatistics) -> None:
    if statistics.lengths:
        report.max_length = task.data.limit
    reader = task.data.reader
    report.rows, report.bad_rows, report.bad = reader.rows, reader.bad_rows, reader.faults
    report.empty_rows, report.duplicates, report.equal_pairs = statistics.empty, statistics.duplicates, statistics.equal
    report.lengths = _distribution(statistics.lengths)
    report.truncated_rows = sum(count for length, count in statistics.lengths.items() if length > report.max_length)
    report.truncated_share = report.truncated_rows / max(1, statistics.lengths.total())
    report.tokens_per_epoch = statistics.tokens
    report.labels = dict(sorted(statistics.labels.items()))
    report.rendered = statistics.rendered


def _distribution(lengths: Counter[int]) -> dict[str, float]:
    """Return percentiles by the nearest rank."""
    if not lengths:
        return {}
    ordered = sorted(lengths.elements())
    ranks = {f"p{p}": ordered[math.ceil(p * len(ordered) / 100) - 1] for p in PERCENTILES}
    return {"min": ordered[0], "mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def _warnings(train: TrainConfig, report: PreflightReport, notices: Sequence[str]) -> list[str]:
    notes = list(notices)
    if report.bad_rows:
        notes.append(f"{report.bad_rows} bad rows are left out, as data.bad_share allows")
    if report.truncated_share >= 0.01:
        notes.append(f"{report.truncated_share:.0%} of the rows are longer than max_length {train.max_length} and cut")
    if report.dropped_rows:
        notes.append(f"{report.dropped_rows} rows are dropped: nothing to learn within max_length {train.max_length}")
    if report.empty_rows:
        notes.append(f"{report.empty_rows} rows have a blank in what is read or learned")
    if report.duplicates:
        notes.append(f"{report.duplicates} rows repeat an earlier one; they may be in the training and held-out part")
    if report.equal_pairs:
        notes.append(f"{report.equal_pairs} rows have equal answers, chosen and rejected: nothing is learned from them")
    labels_warning = cells.many_labels_warning(len(report.labels), report.rows - report.bad_rows, train.data.label)
    if labels_warning and train.task != "token_classification":
        notes.append(labels_warning)
    if not report.heldout_rows:
        notes.append("no row is held out, so the end cannot say whether the model got better")
    return notes


def _check_model(task: Task[Any], train: TrainConfig, sample: RowSample) -> list[str]:
    """Check adapters, attention kernel and the sampled rows on a model built without weights; return warnings.

    Raises: UserFault for missing modules, an unsupported kernel, or a row that the model cannot take.
    """
    from trainer.models import accelerations

    try:
        model = task.model.build_hollow()
    except ImportError as e:  # The model's own code may import packages that only the training's machine has.
        reason = (str(e).strip().splitlines() or ["ImportError"])[0]
        return [f"no row was tried in the model, because its code does not load here ({reason})"]
    task.model.check_targets(model)
    if not accelerations.has_kernel(model, train.attention):
        raise UserFault(
            f"train.attention: {train.model!r} ({model.config.model_type}) has no {train.attention} kernel; use auto"
        )
    if task.model.needs_weights:
        return []
    for number, parsed in sample.rows().items():
        example = task.data.example(parsed)
        if not task.data.targets(example):
            continue
        try:
            forward_check.check_example(task, model, example)
        except forward_check.ForwardRefused as e:
            raise UserFault(
                f"train.model: {train.model!r} cannot take row {number} of {task.data.where} ({e}); "
                f"{task.model.unfit_hint}"
            ) from None
        except forward_check.ForwardUnknown as e:
            return [f"no row was tried in the model, because that needs its weights ({e})"]
    return []


def table(report: PreflightReport) -> str:
    """Return the report as text for users."""
    lines = [("spec", report.spec), ("model", report.model or "not looked at")]
    if report.rows:
        parts = f"{report.train_rows:,} to train on, {report.heldout_rows:,} held out; {report.steps:,} steps"
        lines.append(("rows", f"{report.rows:,}: {parts}"))
        lines += [("settled", report.settled)] if report.settled else []
        lines.append(("", f"{report.bad_rows:,} bad, {report.empty_rows:,} empty, {report.duplicates:,} duplicates"))
        lines += [("bad", fault) for fault in report.bad]
    if report.lengths:
        lines.append(("tokens", ", ".join(f"{name} {value:,.0f}" for name, value in report.lengths.items())))
        cut = f"{report.truncated_share:.1%} of the rows are cut to {report.max_length:,}"
        lines.append(("", f"{cut}; {report.tokens_per_epoch:,} an epoch"))
    if report.labels:
        lines.append(("labels", ", ".join(f"{name} {count:,}" for name, count in report.labels.items())))
    for row in report.rendered:
        lines += [(f"row {row.row}", repr(row.text)), ("  learned", repr(row.learned))]
    lines += [("warning", warning) for warning in report.warnings]
    return "\n".join(f"{name:<10} {text}".rstrip() for name, text in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return the contract's exit code: 0, 64, 65, or 75 if the Hub does not answer."""
    parser = argparse.ArgumentParser(prog="python -m trainer.preflight", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("spec", type=Path, help="a job's spec or a TrainConfig, YAML or JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        remote_code.FLAG, action="store_true", help="run the model's own code, where the spec says so too"
    )
    arguments = parser.parse_args(argv)
    for noisy in ("transformers", "huggingface_hub", "trainer.tasks"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    report = check(arguments.spec, trusted=arguments.trust_remote_code)
    print(json.dumps(asdict(report), ensure_ascii=False) if arguments.json else table(report))
    if report.problem:
        print(f"{arguments.spec}: {report.problem}", file=sys.stderr)
    return int(report.code)


if __name__ == "__main__":
    sys.exit(main())
