"""Token classification: one tag per word, e.g. for named entities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED, padded
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.prompts import DataError
from trainer.models import loading
from trainer.tasks.common import label_metrics
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.label_metrics import Labels
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch, TaskData
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples, evaluation_mode
from trainer.tasks.text.labelled_text import text_logits

Tags = tuple[tuple[int, ...], tuple[int, ...]]
"""Expected and predicted tags of one text, word by word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Text as token ids; a word's first token has its tag, its other tokens have IGNORED."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedWords:
    """Parsed row: text as token ids, the word that begins at each token, and the name of each word's tag."""

    ids: list[int]
    starts: list[int | None]
    tags: list[str]


class TokenClassData(TaskData[Tagged]):
    """Words with tags as token ids."""

    parsed_type = TaggedWords

    labels: Labels
    """Tags. Set by `read`."""

    def _load_tokenizer(self) -> Any:
        # Words are passed as a list, without the spaces that the tokenizer expects before a word.
        tokenizer = loading.tokenizer_of(self.config, add_prefix_space=True)
        if not tokenizer.is_fast:
            raise UserFault(
                f"train.model: the tokenizer of {self.config.model!r} cannot tell which word a token is of; take a "
                "model that has a tokenizer.json"
            )
        return tokenizer

    def parse_row(self, row: Row, number: int) -> TaggedWords:
        data = self.config.data
        words = cells.required("words", row, data.words, self.where, number)
        tags = cells.required("tags", row, data.label, self.where, number)
        if len(words) != len(tags):
            raise DataError(f"{self.where} row {number}: {len(words)} words and {len(tags)} tags; give each word one")
        tags = cells.known_labels(tags, data.labels, self.where, number)
        ids, starts = self.tokenise(words)
        return TaggedWords(ids=ids, starts=starts, tags=tags)

    def tokenise(self, words: list[str]) -> tuple[list[int], list[int | None]]:
        """Return the token ids and, for each token, the word that begins with it."""
        encoded = self.tokenizer(words, is_split_into_words=True, truncation=True, max_length=self.config.max_length)
        word_of, word_before = encoded.word_ids(), [None, *encoded.word_ids()]
        starts = [w if w != before else None for w, before in zip(word_of, word_before, strict=False)]
        return list(encoded["input_ids"]), starts

    def _survey(self, parsed: Sequence[TaggedWords]) -> None:
        self.labels = Labels(self.config.data, loading.head_labels(self.config), self.reader.notice_all)
        self.labels.collect(tag for row in parsed for tag in row.tags)

    def _example(self, parsed: TaggedWords) -> Tagged:
        targets = [IGNORED if word is None else self.labels.number(parsed.tags[word]) for word in parsed.starts]
        return Tagged(ids=parsed.ids, labels=targets)

    def size(self, example: Tagged) -> int:
        return len(example.ids)

    def targets(self, example: Tagged) -> int:
        return sum(label != IGNORED for label in example.labels)

    def collate(self, examples: Sequence[Tagged], device: torch.device) -> Batch:
        """Return `input_ids`, `attention_mask` and `labels`: rows x longest row, int64."""
        return {
            "input_ids": padded([e.ids for e in examples], self.pad, device),
            "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
            "labels": padded([e.labels for e in examples], IGNORED, device),
        }


class TokenClassModel(TaskModel[TokenClassData]):
    """Model with one output for each tag and token. The loss of a word is the cross-entropy of its tag in nats."""

    architecture = "AutoModelForTokenClassification"
    peft_type = "TOKEN_CLS"
    headed = True

    def _head_options(self) -> dict[str, Any]:
        return self._data.labels.head_options()

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return _loss_sum(text_logits(model, batch), batch["labels"])

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Tags]]:
        """Return the sum of the losses, and the expected and predicted tags of each text."""
        logits = text_logits(model, batch)
        judged: list[Tags] = []
        for expected, predicted in zip(batch["labels"].tolist(), logits.argmax(-1).tolist(), strict=True):
            with_tag = [n for n, label in enumerate(expected) if label != IGNORED]
            judged.append((tuple(expected[n] for n in with_tag), tuple(predicted[n] for n in with_tag)))
        return _loss_sum(logits, batch["labels"]), judged

    def metrics(self, judged: Sequence[Tags]) -> Mapping[str, float]:
        pairs = [pair for expected, predicted in judged for pair in zip(expected, predicted, strict=True)]
        names = self._data.labels.names
        scores = {"accuracy": label_metrics.accuracy(pairs)}
        if label_metrics.has_spans(names):
            forms = {"closed": label_metrics.is_closed(names), "ended": label_metrics.is_ended(names)}
            spans = [
                tuple(label_metrics.spans([names[n] for n in tags], **forms) for tags in tag_lists)
                for tag_lists in judged
            ]
            scores["span_f1"] = label_metrics.span_f1(spans)
        return scores


class TokenClassSamples(TaskSamples[TokenClassData]):
    """Words of each prompt with their most probable tag."""

    def describe(self, parsed: TaggedWords) -> tuple[str, str]:
        return self._data.tokenizer.decode(parsed.ids), " ".join(parsed.tags)

    def check(self) -> None:
        for prompt in filter(str.split, self.config.samples.prompts):
            self._data.check_prompt(prompt, self._data.tokenise(prompt.split())[0])

    def write(self, model: Any, device: torch.device) -> list[str]:
        with evaluation_mode(model):
            return [self._tagged_text(model, prompt.split(), device) for prompt in self.config.samples.prompts]

    def _tagged_text(self, model: Any, words: list[str], device: torch.device) -> str:
        ids, starts = self._data.tokenise(words)
        batch = self._data.collate([Tagged(ids=ids, labels=[IGNORED] * len(ids))], device)
        best = text_logits(model, batch)[0].argmax(-1).tolist()
        tags = [(word, best[token]) for token, word in enumerate(starts) if word is not None]
        return " ".join(f"{words[word]}/{self._data.labels.names[tag]}" for word, tag in tags)


class TokenClassification(Task[Tagged]):
    """Task that predicts a tag for each word."""

    data: TokenClassData

    def __init__(self, config: TrainConfig) -> None:
        data = TokenClassData(config)
        super().__init__(data, TokenClassModel(config, data), TokenClassSamples(config, data))


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses. `logits`: rows x tokens x tags, float32; `labels`: rows x tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
