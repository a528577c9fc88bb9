"""Classification and regression of whole texts."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional

from trainer.batching.examples import padded
from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.prompts import fill_prompt
from trainer.tasks.common import generation as writing
from trainer.tasks.common import label_metrics as labelled
from trainer.tasks.common.base import Batch, Row, Task
from trainer.tasks.common.label_metrics import Labels

L = TypeVar("L", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled(Generic[L]):
    """Text as token ids, and its class or number."""

    ids: list[int]
    label: L


class _Texts(Task[Labelled[L]]):
    """Base class for models with a head over the whole text; decoders use the last token."""

    architecture = "AutoModelForSequenceClassification"
    adapters = "SEQ_CLS"
    made = Labelled
    headed = True

    def example(self, row: Row, number: int) -> Labelled[Any]:
        ids = self._ids(fill_prompt(self.config.data, row, number))
        return Labelled(ids=ids, label=self._cell(row, number))

    def _survey(self, found: Sequence[Labelled[Any]]) -> None:
        self._settle_labels(row.label for row in found)

    def _settled(self, found: Labelled[Any]) -> Labelled[L]:
        return Labelled(ids=found.ids, label=self._label(found.label))

    def shown(self, example: Labelled[Any]) -> tuple[str, str]:
        return self.tokenizer.decode(example.ids), str(example.label)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, truncation=True, max_length=self.config.max_length)["input_ids"])

    def check_samples(self) -> None:
        if (empty := next((p for p in self.config.samples.prompts if not self._ids(p)), None)) is not None:
            raise UserFault(writing.blank(empty))

    def _settle(self, model: Any) -> None:
        model.config.pad_token_id = self.pad  # by which decoders find the last token

    def size(self, example: Labelled[L]) -> int:
        return len(example.ids)

    def targets(self, example: Labelled[L]) -> int:
        return 1 if example.ids else 0

    def collate(self, examples: Sequence[Labelled[L]], device: torch.device) -> Batch:
        return {
            "input_ids": padded([e.ids for e in examples], self.pad, device),
            "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
            "labels": torch.tensor([e.label for e in examples]).to(device),
        }

    def _logits(self, model: Any, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return found.float()

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._loss(self._logits(model, batch), batch["labels"])

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        logits = self._logits(model, batch)
        found = zip(batch["labels"].tolist(), self._found(logits), strict=True)
        return self._loss(logits, batch["labels"]), list(found)

    @torch.no_grad()
    def write(self, model: Any, device: torch.device) -> list[str]:
        model.eval()
        try:
            texts = [Labelled(ids=self._ids(p), label=self._none()) for p in self.config.samples.prompts]
            return [self._say(self._logits(model, self.collate([t], device))) for t in texts]
        finally:
            model.train()

    def _nothing(self) -> str:
        return "data: no row has a text; check data.prompt"

    # ------------------------------------------------------------------------------------------- a class, or a number

    @abstractmethod
    def _cell(self, row: Row, number: int) -> Any:
        """Return the label's cell. Raises DataError."""

    def _settle_labels(self, found: Iterable[Any]) -> None:
        """Set the labels from those of all rows. Raises DataFault."""

    @abstractmethod
    def _label(self, cell: Any) -> L: ...

    @abstractmethod
    def _none(self) -> L:
        """Return a placeholder label for a text without one."""

    @abstractmethod
    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _found(self, logits: torch.Tensor) -> list[L]: ...

    @abstractmethod
    def _say(self, logits: torch.Tensor) -> str:
        """Return the prediction for one text as a text."""


class TextClassification(_Texts[int]):
    """Task with the cross-entropy (nats) of a row's class as loss."""

    def _cell(self, row: Row, number: int) -> str:
        found: str = cells.taken("label", row, self.config.data.label, self.where, number)
        cells.known((found,), self.config.data.labels, self.where, number)
        return found

    def _settle_labels(self, found: Iterable[str]) -> None:
        self._labels = Labels(self.config.data)
        self._labels.settle(found)

    def _label(self, cell: str) -> int:
        return self._labels.number(cell)

    def _none(self) -> int:
        return 0

    def _head(self) -> dict[str, Any]:
        return {**self._labels.head(), "problem_type": "single_label_classification"}

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, reduction="sum")

    def _found(self, logits: torch.Tensor) -> list[int]:
        return [int(n) for n in logits.argmax(-1)]

    def metrics(self, judged: Sequence[Any]) -> Mapping[str, float]:
        return {"accuracy": labelled.accuracy(judged), "macro_f1": labelled.macro_f1(judged)}

    def _say(self, logits: torch.Tensor) -> str:
        best = int(logits[0].argmax())
        return f"{self._labels.names[best]} ({float(logits[0].softmax(-1)[best]):.2f})"


class TextRegression(_Texts[float]):
    """Task with the squared error of a row's number as loss."""

    def _cell(self, row: Row, number: int) -> float:
        found: float = cells.taken("number", row, self.config.data.label, self.where, number)
        return found

    def _label(self, cell: float) -> float:
        return cell

    def _none(self) -> float:
        return 0.0

    def _head(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression", "ignore_mismatched_sizes": True}

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(logits[:, 0], labels.float(), reduction="sum")

    def _found(self, logits: torch.Tensor) -> list[float]:
        return [float(n) for n in logits[:, 0]]

    def metrics(self, judged: Sequence[Any]) -> Mapping[str, float]:
        return labelled.errors(judged)

    def _say(self, logits: torch.Tensor) -> str:
        return f"{float(logits[0, 0]):.4g}"
