"""Classification: one class for each text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.train import TrainConfig
from trainer.dataset import cells
from trainer.models import loading
from trainer.tasks.common import label_metrics
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.label_metrics import Labels
from trainer.tasks.common.task import Task
from trainer.tasks.text.labelled_text import Labelled, LabelledTextData, LabelledTextModel, LabelledTextSamples


class TextClassData(LabelledTextData[int]):
    """Token ids of each text, and the number of its class."""

    labels: Labels
    """Classes. Set by `read`."""

    def _label_cell(self, row: Row, number: int) -> str:
        label: str = cells.required("label", row, self.config.data.label, self.where, number)
        return cells.known_labels((label,), self.config.data.labels, self.where, number)[0]

    def _survey(self, parsed: Sequence[Labelled[Any]]) -> None:
        self.labels = Labels(self.config.data, loading.head_labels(self.config), self.reader.notice_all)
        self.labels.collect(row.label for row in parsed)

    def _example(self, parsed: Labelled[Any]) -> Labelled[int]:
        return Labelled(ids=parsed.ids, label=self.labels.number(parsed.label))


class TextClassModel(LabelledTextModel[TextClassData]):
    """Model with one output for each class. The loss of a row is the cross-entropy of its class in nats."""

    def _head_options(self) -> dict[str, Any]:
        return {**self._data.labels.head_options(), "problem_type": "single_label_classification"}

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, reduction="sum")

    def _predictions(self, logits: torch.Tensor) -> list[int]:
        return [int(n) for n in logits.argmax(-1)]

    def metrics(self, judged: Sequence[tuple[int, int]]) -> Mapping[str, float]:
        return {"accuracy": label_metrics.accuracy(judged), "macro_f1": label_metrics.macro_f1(judged)}


class TextClassSamples(LabelledTextSamples[TextClassData]):
    """Most probable class of each prompt, with its probability."""

    def _prediction_text(self, logits: torch.Tensor) -> str:
        best = int(logits[0].argmax())
        return f"{self._data.labels.names[best]} ({float(logits[0].softmax(-1)[best]):.2f})"


class TextClassification(Task[Labelled[int]]):
    """Task that predicts a class for each text."""

    def __init__(self, config: TrainConfig) -> None:
        data = TextClassData(config)
        super().__init__(data, TextClassModel(config, data), TextClassSamples(config, data))
