"""Sequence-to-sequence training of encoder-decoders, e.g. for summaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED, padded
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.dataset.prompts import render
from trainer.models import auxiliary_losses, max_positions
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.generation import empty_prompt_message
from trainer.tasks.common.label_metrics import rouge_l
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch, TaskData
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples, evaluation_mode

ROUGE_ROWS = 32
"""Number of held-out rows for ROUGE; generating a text takes far longer than computing a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Input tokens, and target tokens with the end token."""

    ids: list[int]
    labels: list[int]
    number: int
    """Row number, from 1."""


class Seq2SeqData(TaskData[Pair]):
    """Pairs of texts as token ids."""

    parsed_type = Pair

    decoder_start: int
    """Token id with which the decoder begins. `Seq2SeqModel` sets it when the model is loaded; `collate` needs it."""

    def parse_row(self, row: Row, number: int) -> Pair:
        source, target = render(self.config.data, row, number)
        labels = self.token_ids(target, target=True)
        return Pair(ids=self.token_ids(source), labels=labels if target.strip() else [], number=number)

    def token_ids(self, text: str, *, target: bool = False) -> list[int]:
        """Return token ids cut to `max_length`. A cut keeps the end token; a target without an end token gets one."""
        argument = {"text_target": text} if target else {"text": text}
        ids = list(self.tokenizer(**argument, truncation=True, max_length=self.config.max_length)["input_ids"])
        end = self.tokenizer.eos_token_id
        return [*ids[: self.config.max_length - 1], end] if target and end is not None and end not in ids else ids

    def sequences(self, parsed: Pair) -> tuple[Sequence[int], ...]:
        return parsed.ids, parsed.labels

    def _no_target_message(self) -> str:
        return "data: data.completion is empty in every row, so there is nothing to learn; name a column with text"

    def size(self, example: Pair) -> int:
        return len(example.ids) + len(example.labels)

    def targets(self, example: Pair) -> int:
        return len(example.labels)

    def collate(self, examples: Sequence[Pair], device: torch.device) -> Batch:
        """Return `input_ids` and `attention_mask` (rows x longest input), and `numbers` (row numbers, on the host).

        `decoder_input_ids` and `labels` are rows x longest target.
        """
        return {
            "input_ids": padded([e.ids for e in examples], self.pad, device),
            "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
            "decoder_input_ids": padded([[self.decoder_start, *e.labels[:-1]] for e in examples], self.pad, device),
            "labels": padded([e.labels for e in examples], IGNORED, device),
            "numbers": torch.tensor([e.number for e in examples]),
        }


class Seq2SeqModel(TaskModel[Seq2SeqData]):
    """Encoder-decoder. The loss of a target token is its cross-entropy in nats, and the router's losses."""

    architecture = "AutoModelForSeq2SeqLM"
    peft_type = "SEQ_2_SEQ_LM"

    _rouge_rows: frozenset[int]
    """Numbers of the held-out rows for ROUGE."""
    _has_router_loss = False
    """True if the model adds the router's losses to its own. Set by `_configure`."""

    def _configure(self, model: Any) -> None:
        start = model.config.decoder_start_token_id
        if start is None:
            raise UserFault(
                "train.model: its config.json has no decoder_start_token_id; add the one it was trained with"
            )
        self._data.decoder_start = int(start)
        self._has_router_loss = auxiliary_losses.asks_for_router_loss(model.config)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        inputs = {n: batch[n] for n in ("input_ids", "attention_mask", "decoder_input_ids")}
        has_loss = batch["labels"] != IGNORED
        if self._has_router_loss:  # The model adds them to its own loss, the mean over the targets.
            options = {"use_cache": False, auxiliary_losses.ROUTER_LOGITS: True}  # Switch Transformers reads no config.
            loss: torch.Tensor = model(**inputs, labels=batch["labels"], **options).loss
            return loss.float() * has_loss.sum()
        logits = model(**inputs, use_cache=False).logits
        return functional.cross_entropy(logits[has_loss].float(), batch["labels"][has_loss], reduction="sum")

    def choose_judged(self, held_out: Sequence[Pair]) -> None:
        self._rouge_rows = frozenset(e.number for e in held_out[:ROUGE_ROWS])

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[tuple[str, str]]]:
        """Return the sum of the losses, and (target text, generated text) of each row for ROUGE."""
        rows = [row for row, number in enumerate(batch["numbers"].tolist()) if number in self._rouge_rows]
        loss = self.loss_sum(model, batch)
        if not rows:
            return loss, ()
        tokenizer = self._data.tokenizer
        generated = _generate(self.config, tokenizer, model, batch["input_ids"][rows], batch["attention_mask"][rows])
        targets = [[t for t in batch["labels"][row].tolist() if t != IGNORED] for row in rows]
        return loss, list(zip(_decode(tokenizer, targets), generated, strict=True))

    def metrics(self, judged: Sequence[tuple[str, str]]) -> Mapping[str, float]:
        if not judged:
            return {}
        return {"rouge_l": sum(rouge_l(target, generated) for target, generated in judged) / len(judged)}


class Seq2SeqSamples(TaskSamples[Seq2SeqData]):
    """Texts generated for prompts."""

    def describe(self, parsed: Pair) -> tuple[str, str]:
        tokenizer = self._data.tokenizer
        return tokenizer.decode(parsed.ids), tokenizer.decode(parsed.labels)

    def check(self) -> None:
        samples, limit = self.config.samples, max_positions.learned_positions(self.config)
        for prompt in samples.prompts:
            ids = self._data.token_ids(prompt)
            if not ids:
                raise UserFault(empty_prompt_message(prompt))
            self._data.check_prompt(prompt, ids)
        if samples.prompts and limit is not None and samples.max_new_tokens > limit:
            raise UserFault(
                f"samples.max_new_tokens: {samples.max_new_tokens} are more than the {limit} positions of "
                f"{self.config.model!r}; lower it"
            )

    def write(self, model: Any, device: torch.device) -> list[str]:
        data = self._data
        with evaluation_mode(model):
            inputs = [torch.tensor([data.token_ids(prompt)], device=device) for prompt in self.config.samples.prompts]
            return [_generate(self.config, data.tokenizer, model, ids, torch.ones_like(ids))[0] for ids in inputs]


class Seq2Seq(Task[Pair]):
    """Task that generates a target text from an input text."""

    data: Seq2SeqData

    def __init__(self, config: TrainConfig) -> None:
        data = Seq2SeqData(config)
        super().__init__(data, Seq2SeqModel(config, data), Seq2SeqSamples(config, data))


def _generate(config: TrainConfig, tokenizer: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
    """Return the greedily generated text of each row. `ids`, `mask`: rows x longest input."""
    generated = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=config.samples.max_new_tokens,
        min_length=0,
        num_beams=1,
        do_sample=False,
        use_cache=True,
    )
    return _decode(tokenizer, generated)


def _decode(tokenizer: Any, ids: Any) -> list[str]:
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
