"""Sequence-to-sequence training of encoder-decoders, e.g. for summaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED, padded
from trainer.core.errors import UserFault
from trainer.dataset.prompts import render
from trainer.models import max_positions as positions
from trainer.tasks.common import generation as writing
from trainer.tasks.common.base import Batch, Row, Task
from trainer.tasks.common.label_metrics import rouge_l

WRITTEN = 32
"""Number of held-out rows for ROUGE; generating a text takes far longer than computing a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Input tokens, and target tokens with the end token."""

    ids: list[int]
    labels: list[int]
    number: int
    """Row number, from 1."""


class Seq2Seq(Task[Pair]):
    """Task with the cross-entropy (nats) of a target token as loss."""

    architecture = "AutoModelForSeq2SeqLM"
    adapters = "SEQ_2_SEQ_LM"
    made = Pair

    def example(self, row: Row, number: int) -> Pair:
        read, written = render(self.config.data, row, number)
        labels = self._ids(written, target=True)
        return Pair(ids=self._ids(read), labels=labels if written.strip() else [], number=number)

    def sequences(self, example: Pair) -> tuple[Sequence[int], ...]:
        return example.ids, example.labels

    def shown(self, example: Pair) -> tuple[str, str]:
        return self.tokenizer.decode(example.ids), self.tokenizer.decode(example.labels)

    def _ids(self, text: str, *, target: bool = False) -> list[int]:
        """Return token ids cut to `max_length`. A cut keeps the end token; a target without one gets it."""
        given = {"text_target": text} if target else {"text": text}
        ids = list(self.tokenizer(**given, truncation=True, max_length=self.config.max_length)["input_ids"])
        end = self.tokenizer.eos_token_id
        return [*ids[: self.config.max_length - 1], end] if target and end is not None and end not in ids else ids

    def _nothing(self) -> str:
        return "data: data.completion is empty in every row, so there is nothing to learn; name a column with text"

    def check_samples(self) -> None:
        samples, reach = self.config.samples, positions.learned(self.config)
        if (empty := next((p for p in samples.prompts if not self._ids(p)), None)) is not None:
            raise UserFault(writing.blank(empty))
        if samples.prompts and reach is not None and samples.max_new_tokens > reach:
            raise UserFault(
                f"samples.max_new_tokens: {samples.max_new_tokens} are more than the {reach} positions of "
                f"{self.config.model!r}; lower it"
            )

    def _settle(self, model: Any) -> None:
        start = model.config.decoder_start_token_id
        if start is None:
            raise UserFault(
                "train.model: its config.json has no decoder_start_token_id; add the one it was trained with"
            )
        self._start = int(start)

    def size(self, example: Pair) -> int:
        return len(example.ids) + len(example.labels)

    def targets(self, example: Pair) -> int:
        return len(example.labels)

    def collate(self, examples: Sequence[Pair], device: torch.device) -> Batch:
        return {
            "input_ids": padded([e.ids for e in examples], self.pad, device),
            "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
            "decoder_input_ids": padded([[self._start, *e.labels[:-1]] for e in examples], self.pad, device),
            "labels": padded([e.labels for e in examples], IGNORED, device),
            "numbers": torch.tensor([e.number for e in examples]),
        }

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        given = {n: batch[n] for n in ("input_ids", "attention_mask", "decoder_input_ids")}
        logits = model(**given, use_cache=False).logits
        carries = batch["labels"] != IGNORED
        return functional.cross_entropy(logits[carries].float(), batch["labels"][carries], reduction="sum")

    def choose(self, held: Sequence[Pair]) -> None:
        self._chosen = frozenset(e.number for e in held[:WRITTEN])

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        kept = [(number, row) for row, number in enumerate(batch["numbers"].tolist()) if number in self._chosen]
        loss = self.loss_sum(model, batch)
        if not kept:
            return loss, ()
        rows = [row for _, row in kept]
        written = self._written(model, batch["input_ids"][rows], batch["attention_mask"][rows])
        wanted = [[t for t in batch["labels"][row].tolist() if t != IGNORED] for row in rows]
        return loss, list(zip(self._texts(wanted), written, strict=True))

    def metrics(self, judged: Sequence[tuple[str, str]]) -> Mapping[str, float]:
        return {"rouge_l": sum(rouge_l(wanted, found) for wanted, found in judged) / len(judged)} if judged else {}

    def _texts(self, ids: Any) -> list[str]:
        return [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def _written(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.config.samples.max_new_tokens,
            min_length=0,
            num_beams=1,
            do_sample=False,
            use_cache=True,
        )
        return self._texts(found)

    @torch.no_grad()
    def write(self, model: Any, device: torch.device) -> list[str]:
        model.eval()
        try:
            reads = [torch.tensor([self._ids(prompt)], device=device) for prompt in self.config.samples.prompts]
            return [self._written(model, ids, torch.ones_like(ids))[0] for ids in reads]
        finally:
            model.train()
