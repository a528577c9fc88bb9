"""Causal language modelling on prompts with completions, or on the assistant's turns of chats."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED, Example, by_size, collate, encode
from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.prompts import render
from trainer.tasks.common import chat_template as chats
from trainer.tasks.common import generation as writing
from trainer.tasks.common import packing
from trainer.tasks.common.base import Batch, Row, Task
from trainer.tasks.common.packing import Pack


class CausalLm(Task[Example | Pack]):
    """Task with the cross-entropy (nats) of a token as loss."""

    architecture = "AutoModelForCausalLM"
    adapters = "CAUSAL_LM"
    made = Example

    def _tokenizer(self) -> Any:
        tokenizer = super()._tokenizer()
        if self.config.data.messages and not tokenizer.chat_template:
            raise UserFault(
                f"train.model: the tokenizer of {self.config.model!r} has no chat template; take an instruct model, or "
                "give data.prompt and data.completion"
            )
        return tokenizer

    def example(self, row: Row, number: int) -> Example:
        config = self.config
        if config.data.messages:
            messages = cells.taken("chat", row, config.data.messages, self.where, number)
            return chats.encode(self.tokenizer, messages, config.max_length, f"{self.where} row {number}")
        prompt, completion = render(config.data, row, number)
        return encode(self.tokenizer, prompt, completion, config.max_length)

    def shown(self, example: Example) -> tuple[str, str]:
        return self.tokenizer.decode(example.ids), self.tokenizer.decode([i for i in example.labels if i != IGNORED])

    def _nothing(self) -> str:
        return f"data: no row has a completion within max_length {self.config.max_length}; raise train.max_length"

    def check_samples(self) -> None:
        writing.check(self.config, self.tokenizer, chat=bool(self.config.data.messages))

    def check(self, model: Any, device: torch.device) -> None:
        if self.config.packing:
            packing.check(model, device)

    def size(self, example: Example | Pack) -> int:
        return example.size if isinstance(example, Pack) else len(example.ids)

    def targets(self, example: Example | Pack) -> int:
        return example.targets

    def micro_batches(self, examples: Sequence[Example | Pack], count: int) -> list[list[Example | Pack]]:
        if not self.config.packing:
            return super().micro_batches(examples, count)
        rows = [row for e in examples for row in (e.rows if isinstance(e, Pack) else (e,))]
        return by_size(packing.packed(rows, self.config.max_length), count, self.size)

    def collate(self, examples: Sequence[Example | Pack], device: torch.device) -> Batch:
        if self.config.packing:
            packs = [e if isinstance(e, Pack) else Pack(rows=(e,)) for e in examples]
            batch = packing.collate(packs, self.pad, device)
        else:
            batch = collate([e for e in examples if isinstance(e, Example)], self.pad, device)
        batch["wanted"] = batch.pop("labels")[:, 1:]  # The target of each token is the next token.
        return batch

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(**{n: t for n, t in batch.items() if n != "wanted"}).logits
        wanted = batch["wanted"]
        carries = wanted != IGNORED
        logits = logits[:, : wanted.shape[1]]
        return functional.cross_entropy(logits[carries].float(), wanted[carries], reduction="sum")

    def write(self, model: Any, device: torch.device) -> list[str]:
        chat = bool(self.config.data.messages)
        prompts = writing.rendered(self.tokenizer, self.config.samples, chat=chat)
        if not prompts:
            return []
        return writing.continuations(model, self.tokenizer, self.config.samples, device, prompts, special=not chat)
