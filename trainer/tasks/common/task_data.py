"""Data of a task: rows become parsed rows, examples, and batches of tensors.

A parsed row depends on its own row alone; the token cache stores parsed rows. An example is made from a parsed row. It
may also depend on all other rows, e.g. if it contains the number of a label.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from trainer.batching.examples import by_size
from trainer.batching.mmap_dataset import Subset
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault, UserFault
from trainer.dataset.prompts import DataError, dataset_name
from trainer.models import loading, max_positions
from trainer.tasks.common import template_date
from trainer.tasks.common.example_reader import ExampleReader, Row, RowObserver

E = TypeVar("E")
Batch = dict[str, torch.Tensor]
"""Inputs and targets of one forward pass by name; the first dimension of each tensor is the number of examples."""


class TaskData(ABC, Generic[E]):
    """Data set of a task: reads, tokenises and batches it. `E` is one example."""

    truncates = True
    """True if `parse_row` cuts sequences to `limit` tokens."""
    parsed_type: type[Any] | None = None
    """Dataclass that `parse_row` returns, of numbers and texts alone; None: the parsed rows stay in memory."""
    prepares_ahead = False
    """True if `prepare_ahead` has an effect."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.tokenizer: Any = None
        """Tokenizer of the model, or its image processor; None before `read`."""
        self.encoding_state: Any = None
        """Truncation and padding of the tokenizer as published; see `loading.encoding_state`."""
        self.date = ""
        """Date that chat templates render, as YYYY-MM-DD; empty: the machine's date. To be set before `read`."""
        self.pad = 0
        """Token id of padding."""
        self.where = dataset_name(config.data.path)
        """Name of the data set in messages."""
        self.reader = ExampleReader(config, self._parse_checked, self.parsed_type)
        self.chats: array[int] | None = None
        """Chat of each example that `read` returned, if a chat has several (`data.learn: split`); otherwise None."""
        self._embeddings: int | None = None
        """Number of the model's token embeddings if the tokenizer has higher ids, otherwise None."""
        self._longest = 0
        """Tokens of the longest sequence in rows with a target."""
        self._longest_parsed = (0, 0)
        """Tokens of the longest parsed sequence, and the number of its row from 1."""

    def read(
        self,
        path: Path,
        data_format: Any,
        observe: RowObserver | None = None,
        *,
        cache: Path | None = None,
        data_sha256: str = "",
    ) -> tuple[Sequence[E], int]:
        """Return the examples with a target, and the number of usable rows without one.

        `cache`, `data_sha256`: see `ExampleReader.read`. Raises UserFault. Raises DataFault, e.g. if the share of bad
        rows exceeds `data.bad_share`.
        """
        self._prepare()
        try:
            parsed = self.reader.read(path, data_format, self.tokenizer, observe, cache=cache, data_sha256=data_sha256)
        except DataError as e:
            raise DataFault(str(e)) from None
        self.reader.check()
        self._survey(parsed)
        self.chats = array("Q") if self.config.data.learn == "split" else None
        examples = Subset(parsed, self._with_targets(parsed), self._example)
        if not len(examples):
            raise DataFault(self._no_target_message())
        if self.truncates:
            length, number = self._longest_parsed
            max_positions.check_length(self.config, self._longest, number if length == self._longest else 0)
        return examples, len(parsed) - len(examples)

    def _parse_checked(self, row: Row, number: int) -> Any:
        """Return `parse_row`. Raises UserFault for a token that the model has no embedding for."""
        parsed = self.parse_row(row, number)
        for part in parsed if isinstance(parsed, list) else (parsed,):
            if self._embeddings is not None:
                self._check_embeddings(part, self._embeddings, f"row {number} of {self.where} has")
            self._longest_parsed = max(self._longest_parsed, (max(self.lengths(part), default=0), number))
        return parsed

    def _with_targets(self, parsed: Sequence[Any]) -> Iterator[int]:
        """Yield the indices of the parsed rows with a target.

        Raises UserFault for a row with a token that the model has no embedding for; unused tokens are allowed.
        """
        for index, row in enumerate(parsed):
            if self._embeddings is not None:
                self._check_embeddings(row, self._embeddings)
            if self.targets(self._example(row)) > 0:
                self._longest = max(self._longest, 0, *self.lengths(row))
                if self.chats is not None:
                    self.chats.append(row.chat)
                yield index

    def _check_embeddings(self, parsed: Any, count: int, subject: str = "the rows have") -> None:
        highest = max((max(ids) for ids in self.sequences(parsed) if ids), default=0)
        if highest >= count:
            raise UserFault(f"train.model: {subject} {self._excess_message(highest, count)}")

    def check_prompt(self, prompt: str, ids: Sequence[int]) -> None:
        """Raise UserFault for a prompt of `samples` that the model has too few embeddings or positions for.

        Otherwise the samples fail after the training. Call `read` first.
        """
        limit = max_positions.learned_positions(self.config)
        if limit is not None and len(ids) > limit:
            raise UserFault(
                f"samples.prompts: {prompt[:40]!r} has {len(ids)} tokens, {self.config.model!r} has {limit} positions; "
                "shorten it"
            )
        highest = max(ids, default=0)
        if self._embeddings is not None and highest >= self._embeddings:
            raise UserFault(f"samples.prompts: {prompt[:40]!r} has {self._excess_message(highest, self._embeddings)}")

    def _excess_message(self, token_id: int, count: int) -> str:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        return (
            f"token {token_id} ({token!r}), and {self.config.model!r} has {count} embeddings; resize them to the "
            "tokenizer (resize_token_embeddings), or take the model's own tokenizer"
        )

    def _prepare(self) -> None:
        """Load the tokenizer, before the rows are read. Raises UserFault."""
        self.tokenizer = self._load_tokenizer()
        template_date.fix(self.tokenizer, self.date)
        self.encoding_state = loading.encoding_state(self.tokenizer)
        count = loading.embeddings(self.config)
        self._embeddings = count if count is not None and loading.highest_token(self.tokenizer) >= count else None
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        usable = (t for t in candidates if t is not None and (self._embeddings is None or t < self._embeddings))
        self.pad = next(usable, 0)

    # ------------------------------------------------------------------------------------------------ hooks: one row

    def example(self, parsed: Any) -> E:
        """Return the example of a parsed row. Call `read` first."""
        return self._example(parsed)

    @abstractmethod
    def parse_row(self, row: Row, number: int) -> Any:
        """Return the parsed row, of type `parsed_type` if that is set. `number`: from 1.

        Raises DataError, which names the row, for a bad row.
        """

    def _load_tokenizer(self) -> Any:
        """Return the tokenizer. Raises UserFault for a tokenizer that the task cannot use."""
        return loading.tokenizer_of(self.config)

    def _survey(self, parsed: Sequence[Any]) -> None:
        """Read all parsed rows once, before the first example is made. Raises DataFault."""

    def _example(self, parsed: Any) -> E:
        """Return the example of a parsed row, after `_survey`; called at each access of the example."""
        return parsed  # type: ignore[no-any-return]

    def lengths(self, parsed: Any) -> tuple[int, ...]:
        """Return the tokens of each sequence that `max_length` limits; empty for a row without text."""
        return tuple(map(len, self.sequences(parsed)))

    def sequences(self, parsed: Any) -> tuple[Sequence[int], ...]:
        """Return the sequences of token ids that index the model's embeddings."""
        return (parsed.ids,)

    @property
    def limit(self) -> int:
        """Largest number of tokens of a sequence. Requires `read` before."""
        return self.config.max_length

    def _no_target_message(self) -> str:
        """Return the error for a data set in which no row has a target, and the fix."""
        return f"data: no row has a target within max_length {self.config.max_length}; raise train.max_length"

    # ---------------------------------------------------------------------------------------- hooks: several examples

    @abstractmethod
    def size(self, example: E) -> int:
        """Return the cost of an example: its tokens, or 1 for a picture."""

    @abstractmethod
    def targets(self, example: E) -> int:
        """Return the number of losses of an example; an example with 0 is left out. A step's loss is their mean."""

    @abstractmethod
    def collate(self, examples: Sequence[E], device: torch.device) -> Batch:
        """Return one batch on the device, right-padded to its longest sequence. Requires at least one example.

        Token ids are int64 tensors of rows x longest sequence. Targets of ignored tokens are IGNORED (-100).
        """

    def micro_batches(self, examples: Sequence[E], count: int) -> list[list[E]]:
        """Split a step's examples into forward passes of at most `count` examples."""
        return by_size(examples, count, self.size)

    def begin_step(self, step: int) -> None:
        """Prepare for the batches of a step. An evaluation passes a number that no training step has."""

    def prepare_ahead(self, examples: Sequence[E]) -> None:
        """Start threads that prepare this process's examples of the next step, if `prepares_ahead`.

        The training loop calls it before it trains a step. The batches do not depend on it.
        """
