"""Causal language modelling: the next token of a completion, after its prompt."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.data import check_templates, render
from trainer.dataset import IGNORED, Example, collate, encode
from trainer.tasks.base import Batch, Row, Task
from trainer.tasks.writing import continuations


class CausalLm(Task[Example]):
    """The loss is the cross-entropy (nats) of a token."""

    architecture = "AutoModelForCausalLM"
    adapters = "CAUSAL_LM"

    def _encode(self, rows: Iterable[Row]) -> Iterator[Example]:
        config = self.config
        for number, row in rows:
            if number == 1:
                check_templates(config.data, frozenset(row))
            prompt, completion = render(config.data, row, number)
            yield encode(self.tokenizer, prompt, completion, config.max_length)

    def _nothing(self) -> str:
        return f"data: no row has a completion within max_length {self.config.max_length}; raise train.max_length"

    def size(self, example: Example) -> int:
        return len(example.ids)

    def targets(self, example: Example) -> int:
        return example.targets

    def collate(self, examples: Sequence[Example], device: torch.device) -> Batch:
        return collate(examples, self.pad, device)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(**{n: t for n, t in batch.items() if n != "labels"}).logits
        wanted = batch["labels"][:, 1:]
        carries = wanted != IGNORED
        return functional.cross_entropy(logits[:, :-1][carries].float(), wanted[carries], reduction="sum")

    def write(self, model: Any, device: torch.device) -> list[str]:
        return continuations(model, self.tokenizer, self.config.samples, device)
