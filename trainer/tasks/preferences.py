"""Pairs of answers to one prompt, of which one is the better."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.contract.data import render_preference
from trainer.dataset import IGNORED, Example, collate, encode
from trainer.tasks.base import Batch, Row, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example


class Preferences(Task[Preference]):
    """What a task over such pairs reads, and how."""

    made = Preference

    def example(self, row: Row, number: int) -> Preference:
        config = self.config
        prompt, chosen, rejected = render_preference(config.data, row, number)
        return Preference(
            chosen=encode(self.tokenizer, prompt, chosen, config.max_length),
            rejected=encode(self.tokenizer, prompt, rejected, config.max_length),
        )

    def lengths(self, example: Preference) -> tuple[int, ...]:
        return len(example.chosen.ids), len(example.rejected.ids)

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
        """The chosen answers first, then the rejected ones in the same order."""
        return collate([e.chosen for e in examples] + [e.rejected for e in examples], self.pad, device)
