"""Token classification: one tag per word, e.g. for named entities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED, padded
from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.prompts import DataError
from trainer.models import loading as models
from trainer.tasks.common import label_metrics as labelled
from trainer.tasks.common.base import Batch, Row, Task
from trainer.tasks.common.label_metrics import Labels

Tags = tuple[tuple[int, ...], tuple[int, ...]]
"""Expected and predicted tags of one text, word by word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Text as token ids; a word's first token has its tag, its other tokens have IGNORED."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Text as token ids, the word that begins at each token, and the name of each word's tag."""

    ids: list[int]
    starts: list[int | None]
    tags: list[str]


class TokenClassification(Task[Tagged]):
    """Task with the cross-entropy (nats) of a word's tag as loss."""

    architecture = "AutoModelForTokenClassification"
    adapters = "TOKEN_CLS"
    made = Read
    headed = True

    def _tokenizer(self) -> Any:
        found = models.tokenizer_of(self.config, add_prefix_space=True)  # words come without the spaces between them
        if not found.is_fast:
            raise UserFault(
                f"train.model: the tokenizer of {self.config.model!r} cannot tell which word a token is of; take a "
                "model that has a tokenizer.json"
            )
        return found

    def example(self, row: Row, number: int) -> Read:
        data = self.config.data
        words = cells.taken("words", row, data.words, self.where, number)
        tags = cells.taken("words", row, data.label, self.where, number)
        if len(words) != len(tags):
            raise DataError(f"{self.where} row {number}: {len(words)} words and {len(tags)} tags; give each word one")
        cells.known(tags, data.labels, self.where, number)
        ids, starts = self._tokens(words)
        return Read(ids=ids, starts=starts, tags=tags)

    def _survey(self, found: Sequence[Read]) -> None:
        self._labels = Labels(self.config.data)
        self._labels.settle(tag for row in found for tag in row.tags)

    def _settled(self, found: Read) -> Tagged:
        return Tagged(ids=found.ids, labels=[self._target(found, word) for word in found.starts])

    def _target(self, row: Read, word: int | None) -> int:
        return IGNORED if word is None else self._labels.number(row.tags[word])

    def shown(self, example: Read) -> tuple[str, str]:
        return self.tokenizer.decode(example.ids), " ".join(example.tags)

    def _tokens(self, words: list[str]) -> tuple[list[int], list[int | None]]:
        """Return the token ids and, for each, the word that begins with it."""
        made = self.tokenizer(words, is_split_into_words=True, truncation=True, max_length=self.config.max_length)
        of, before = made.word_ids(), [None, *made.word_ids()]
        return list(made["input_ids"]), [w if w != b else None for w, b in zip(of, before, strict=False)]

    def _head(self) -> dict[str, Any]:
        return self._labels.head()

    def size(self, example: Tagged) -> int:
        return len(example.ids)

    def targets(self, example: Tagged) -> int:
        return sum(label != IGNORED for label in example.labels)

    def collate(self, examples: Sequence[Tagged], device: torch.device) -> Batch:
        return {
            "input_ids": padded([e.ids for e in examples], self.pad, device),
            "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
            "labels": padded([e.labels for e in examples], IGNORED, device),
        }

    def _logits(self, model: Any, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return found.float()

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._loss(self._logits(model, batch), batch["labels"])

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        logits = self._logits(model, batch)
        found = []
        for wanted, said in zip(batch["labels"].tolist(), logits.argmax(-1).tolist(), strict=True):
            kept = [n for n, label in enumerate(wanted) if label != IGNORED]
            found.append((tuple(wanted[n] for n in kept), tuple(said[n] for n in kept)))
        return self._loss(logits, batch["labels"]), found

    def metrics(self, judged: Sequence[Tags]) -> Mapping[str, float]:
        pairs = [pair for wanted, found in judged for pair in zip(wanted, found, strict=True)]
        names = self._labels.names
        scores = {"accuracy": labelled.accuracy(pairs)}
        if any(name.startswith("B-") for name in names):
            spans = [tuple(labelled.spans([names[n] for n in tags]) for tags in both) for both in judged]
            scores["span_f1"] = labelled.span_f1(spans)
        return scores

    @torch.no_grad()
    def write(self, model: Any, device: torch.device) -> list[str]:
        model.eval()
        try:
            return [self._say(model, prompt.split(), device) for prompt in self.config.samples.prompts]
        finally:
            model.train()

    def _say(self, model: Any, words: list[str], device: torch.device) -> str:
        ids, starts = self._tokens(words)
        batch = self.collate([Tagged(ids=ids, labels=[IGNORED] * len(ids))], device)
        best = self._logits(model, batch)[0].argmax(-1).tolist()
        said = [(word, best[n]) for n, word in enumerate(starts) if word is not None]
        return " ".join(f"{words[word]}/{self._labels.names[tag]}" for word, tag in said)
