"""Causal language modelling on prompts with completions, or on the assistant's turns of chats."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED, Example, by_size, collate, encode
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.prompts import render
from trainer.models import auxiliary_losses
from trainer.tasks.common import answer_spans, chat_template, packing
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.generation import ContinuationSamples
from trainer.tasks.common.packing import Pack
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch, TaskData
from trainer.tasks.common.task_model import TaskModel

MUTED = "every answer that data.learn selects is muted by weight: 0 or train: false"
"""Notice of a chat from which nothing is learned."""


class CausalLmData(TaskData[Example | Pack]):
    """Texts or chats as token ids. With `packing`, `micro_batches` joins examples to packs."""

    parsed_type = Example

    @property
    def has_chats(self) -> bool:
        """True if the rows are chats."""
        return bool(self.config.data.messages)

    def _load_tokenizer(self) -> Any:
        tokenizer = super()._load_tokenizer()
        if self.has_chats and not tokenizer.chat_template:
            raise UserFault(
                f"train.model: the tokenizer of {self.config.model!r} has no chat template; take an instruct model, or "
                "give data.prompt and data.completion"
            )
        return tokenizer

    def parse_row(self, row: Row, number: int) -> Example | list[Example]:
        config = self.config
        if self.has_chats:
            return self._chat_examples(row, number)
        prompt, completion = render(config.data, row, number)
        border = prompt[-1:] + completion[:1]
        if len(border) == 2 and border.isascii() and border.isalnum():  # Other scripts may write words without spaces.
            self._notice("prompt and completion meet within a word; begin data.completion with a space")
        return encode(self.tokenizer, prompt, completion, config.max_length)

    def _chat_examples(self, row: Row, number: int) -> Example | list[Example]:
        """Return the example of a chat, or one for each of its answers by `data.learn: split`. Raises DataError."""
        data, place = self.config.data, f"{self.where} row {number}"
        chat = cells.chat_of_row(row, data.messages, self.where, number)
        for text in (*chat.notices, *chat_template.unused(self.tokenizer, chat)):
            self.reader.notices[text] += 1
        numbers = answer_spans.answer_indices(chat)
        if chat.muted.issuperset(numbers[-1:] if data.learn == "last" else numbers):
            self._notice(MUTED)
        if data.learn == "split":
            answers = chat_template.split(self.tokenizer, chat, self.config.max_length, place)
            return [replace(answer, chat=number) for answer in answers]
        return chat_template.encode(
            self.tokenizer, chat, self.config.max_length, place, last=data.learn == "last", notice=self._notice
        )

    def _notice(self, text: str) -> None:
        self.reader.notices[text] += 1

    def _no_target_message(self) -> str:
        if muted := self.reader.notices[MUTED]:
            return f"{self.where}: no row has an answer to learn: in {muted:,} of {self.reader.rows:,} rows {MUTED}"
        return f"data: no row has a completion within max_length {self.config.max_length}; raise train.max_length"

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
        """Return `input_ids` and either `attention_mask` or, for packs, `position_ids`: rows x longest row.

        `wanted` (rows x longest row - 1) has the target of each token, which is the next token.
        """
        if self.config.packing:
            packs = [e if isinstance(e, Pack) else Pack(rows=(e,)) for e in examples]
            batch = packing.collate(packs, self.pad, device)
        else:
            batch = collate([e for e in examples if isinstance(e, Example)], self.pad, device)
        batch["wanted"] = batch.pop("labels")[:, 1:]
        return batch


class CausalLmModel(TaskModel[CausalLmData]):
    """Decoder. The loss of a token is its cross-entropy in nats, and the auxiliary losses that the model adds."""

    architecture = "AutoModelForCausalLM"
    peft_type = "CAUSAL_LM"

    def check_on_device(self, model: Any, device: torch.device) -> None:
        if self.config.packing:
            packing.check(model, device)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        outputs = model(**{n: t for n, t in batch.items() if n != "wanted"})
        targets = batch["wanted"]
        has_loss = targets != IGNORED
        logits = outputs.logits[:, : targets.shape[1]]
        loss = functional.cross_entropy(logits[has_loss].float(), targets[has_loss], reduction="sum")
        return loss + auxiliary_losses.auxiliary_sum(model, outputs, has_loss.sum())


class CausalLmSamples(ContinuationSamples[CausalLmData]):
    """Continuations of prompts."""

    def _has_chats(self) -> bool:
        return self._data.has_chats

    def describe(self, parsed: Example) -> tuple[str, str]:
        tokenizer = self._data.tokenizer
        return tokenizer.decode(parsed.ids), tokenizer.decode([i for i in parsed.labels if i != IGNORED])


class CausalLm(Task[Example | Pack]):
    """Next-token prediction."""

    def __init__(self, config: TrainConfig) -> None:
        data = CausalLmData(config)
        super().__init__(data, CausalLmModel(config, data), CausalLmSamples(config, data))
