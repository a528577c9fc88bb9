"""Preference pairs: a chosen and a rejected answer to one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.batching.examples import IGNORED, Example, collate, encode
from trainer.dataset import cells
from trainer.dataset.prompts import DataError, fill_prompt, render_preference, whole_column
from trainer.tasks.common import chat_template as chats
from trainer.tasks.common.base import Batch, Row, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Chosen and rejected answer to one prompt."""

    chosen: Example
    rejected: Example
    chat: bool = False
    """True if the answers are an assistant's turns, rendered by the model's chat template."""


class Preferences(Task[Preference]):
    """Base class of the tasks on preference pairs: reads and batches them."""

    made = Preference

    chatty = False
    """True if the rows are chats. Set by `examples`."""

    def example(self, row: Row, number: int) -> Preference:
        config = self.config
        answers = [row.get(whole_column(template) or "") for template in (config.data.chosen, config.data.rejected)]
        if all(isinstance(answer, list) for answer in answers):
            better, worse = (self._answer(row, number, name) for name in ("chosen", "rejected"))
            return Preference(chosen=better, rejected=worse, chat=True)
        prompt, chosen, rejected = render_preference(config.data, row, number)
        return Preference(
            chosen=encode(self.tokenizer, prompt, chosen, config.max_length),
            rejected=encode(self.tokenizer, prompt, rejected, config.max_length),
        )

    def _answer(self, row: Row, number: int, setting: str) -> Example:
        """Return the last turn of a chat after its other turns and `data.prompt`. Raises DataError."""
        data, where = self.config.data, f"{self.where} row {number}"
        column = whole_column(getattr(data, setting)) or ""
        answer = cells.taken("chat", row, column, self.where, number)
        before = cells.turns(row.get(whole_column(data.prompt) or ""))
        if before is None:
            before = [{"role": "user", "content": fill_prompt(data, row, number)}] if data.prompt else []
        if before and answer[0]["role"] != "assistant":
            raise DataError(f"{where}: column {column!r} begins with what was asked; leave data.prompt out, or that")
        return chats.encode(self.tokenizer, [*before, *answer], self.config.max_length, where, last=True)

    def _survey(self, found: Sequence[Preference]) -> None:
        self.chatty = bool(found) and found[0].chat

    def sequences(self, example: Preference) -> tuple[Sequence[int], ...]:
        return example.chosen.ids, example.rejected.ids

    def shown(self, example: Preference) -> tuple[str, str]:
        answer = self.tokenizer.decode([i for i in example.rejected.labels if i != IGNORED])
        return self.tokenizer.decode(example.chosen.ids), f"rather than {answer}"

    def _nothing(self) -> str:
        return f"data: no row has two answers within max_length {self.config.max_length}; raise train.max_length"

    def size(self, example: Preference) -> int:
        return len(example.chosen.ids) + len(example.rejected.ids)

    def targets(self, example: Preference) -> int:
        return int(example.chosen.targets > 0 and example.rejected.targets > 0)

    def collate(self, examples: Sequence[Preference], device: torch.device) -> Batch:
        """Return a batch with the chosen answers first, then the rejected ones in the same order."""
        return collate([e.chosen for e in examples] + [e.rejected for e in examples], self.pad, device)
