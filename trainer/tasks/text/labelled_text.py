"""Texts with a label: the common parts of classification and regression of whole texts."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from trainer.batching.examples import padded
from trainer.core.errors import UserFault
from trainer.dataset.prompts import fill_prompt
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.generation import empty_prompt_message
from trainer.tasks.common.task_data import Batch, TaskData
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples, evaluation_mode

L = TypeVar("L", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled(Generic[L]):
    """Text as token ids, and its class or number. A parsed row of a classification has the name of the class."""

    ids: list[int]
    label: L


class LabelledTextData(TaskData[Labelled[L]]):
    """Token ids of each text, and its label."""

    parsed_type = Labelled

    def parse_row(self, row: Row, number: int) -> Labelled[Any]:
        ids = self.token_ids(fill_prompt(self.config.data, row, number))
        return Labelled(ids=ids, label=self._label_cell(row, number))

    @abstractmethod
    def _label_cell(self, row: Row, number: int) -> Any:
        """Return the label's cell: the name of a class, or a number. Raises DataError."""

    def token_ids(self, text: str) -> list[int]:
        """Return token ids cut to `max_length`."""
        return list(self.tokenizer(text, truncation=True, max_length=self.config.max_length)["input_ids"])

    def _no_target_message(self) -> str:
        return "data: no row has a text; check data.prompt"

    def size(self, example: Labelled[L]) -> int:
        return len(example.ids)

    def targets(self, example: Labelled[L]) -> int:
        return 1 if example.ids else 0

    def collate(self, examples: Sequence[Labelled[L]], device: torch.device) -> Batch:
        """Return `input_ids` and `attention_mask` (rows x longest row), and `labels` (rows; int64, or float32)."""
        return {
            "input_ids": padded([e.ids for e in examples], self.pad, device),
            "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
            "labels": torch.tensor([e.label for e in examples]).to(device),
        }


T = TypeVar("T", bound=LabelledTextData[Any])


class LabelledTextModel(TaskModel[T]):
    """Model with a head over the whole text; decoders use the last token."""

    architecture = "AutoModelForSequenceClassification"
    peft_type = "SEQ_CLS"
    headed = True

    def _configure(self, model: Any) -> None:
        model.config.pad_token_id = self._data.pad  # Decoders need it to find a row's last token.

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._loss_sum(text_logits(model, batch), batch["labels"])

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[tuple[Any, Any]]]:
        """Return the sum of the losses, and (label, predicted label) of each row."""
        logits = text_logits(model, batch)
        pairs = zip(batch["labels"].tolist(), self._predictions(logits), strict=True)
        return self._loss_sum(logits, batch["labels"]), list(pairs)

    @abstractmethod
    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows' losses. `logits`: rows x outputs of the head, float32; `labels`: rows."""

    @abstractmethod
    def _predictions(self, logits: torch.Tensor) -> list[Any]:
        """Return the predicted label of each row."""


class LabelledTextSamples(TaskSamples[T]):
    """Predicted label of each prompt as text."""

    def describe(self, parsed: Labelled[Any]) -> tuple[str, str]:
        return self._data.tokenizer.decode(parsed.ids), str(parsed.label)

    def check(self) -> None:
        for prompt in self.config.samples.prompts:
            ids = self._data.token_ids(prompt)
            if not ids:
                raise UserFault(empty_prompt_message(prompt))
            self._data.check_prompt(prompt, ids)

    def write(self, model: Any, device: torch.device) -> list[str]:
        with evaluation_mode(model):
            texts = [Labelled(ids=self._data.token_ids(p), label=0) for p in self.config.samples.prompts]
            return [self._prediction_text(text_logits(model, self._data.collate([t], device))) for t in texts]

    @abstractmethod
    def _prediction_text(self, logits: torch.Tensor) -> str:
        """Return the prediction for one text. `logits`: 1 x outputs of the head, float32."""


def text_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return the head's outputs for a batch of token ids in float32; their first dimension is the rows."""
    logits: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits.float()
