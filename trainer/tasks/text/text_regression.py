"""Regression: one number for each text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.train import TrainConfig
from trainer.dataset import cells
from trainer.tasks.common import label_metrics
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.task import Task
from trainer.tasks.text.labelled_text import Labelled, LabelledTextData, LabelledTextModel, LabelledTextSamples


class TextNumberData(LabelledTextData[float]):
    """Token ids of each text, and the number to predict."""

    def _label_cell(self, row: Row, number: int) -> float:
        value: float = cells.required("number", row, self.config.data.label, self.where, number)
        return value


class TextNumberModel(LabelledTextModel[TextNumberData]):
    """Model with one output. The loss of a row is the squared error of its number."""

    def _head_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression", "ignore_mismatched_sizes": True}

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(logits[:, 0], labels.float(), reduction="sum")

    def _predictions(self, logits: torch.Tensor) -> list[float]:
        return [float(n) for n in logits[:, 0]]

    def metrics(self, judged: Sequence[tuple[float, float]]) -> Mapping[str, float]:
        return label_metrics.errors(judged)


class TextNumberSamples(LabelledTextSamples[TextNumberData]):
    """Predicted number of each prompt."""

    def _prediction_text(self, logits: torch.Tensor) -> str:
        return f"{float(logits[0, 0]):.4g}"


class TextRegression(Task[Labelled[float]]):
    """Task that predicts a number for each text."""

    def __init__(self, config: TrainConfig) -> None:
        data = TextNumberData(config)
        super().__init__(data, TextNumberModel(config, data), TextNumberSamples(config, data))
