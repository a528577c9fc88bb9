"""Image classification."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.archives import Picture
from trainer.dataset.prompts import DataError
from trainer.models import loading as models
from trainer.tasks.common import image_loading as pictures
from trainer.tasks.common import label_metrics as labelled
from trainer.tasks.common.base import Batch, Row, Task
from trainer.tasks.common.image_loading import Ahead, Array, ImageCache
from trainer.tasks.common.label_metrics import Labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """Picture and its class."""

    number: int
    """Row number, from 1."""
    row: Row
    label: Any
    """Name of the class; its number after `_settled`."""


class ImageClassification(Task[Shot]):
    """Task for models with a head over a picture. The loss is the cross-entropy (nats) of a row's class."""

    architecture = "AutoModelForImageClassification"
    adapters = None
    headed = True
    looks_ahead = True

    def _prepare(self) -> None:
        """Load the model's image processor as `tokenizer`, so that it is saved with the model."""
        models.check_kind(self.config, self.architecture)
        self.tokenizer = models.image_processor_of(self.config)
        self._kept = ImageCache()
        self._ahead = Ahead(self._sized, pictures.spare_threads())

    def example(self, row: Row, number: int) -> Shot:
        data = self.config.data
        label = cells.taken("label", row, data.label, self.where, number)
        cells.known((label,), data.labels, self.where, number)
        self._kept.offer(number, self._sized(row, number))
        return Shot(number=number, row={data.image: row[data.image]}, label=label)

    def _sized(self, row: Row, number: int) -> Array:
        """Return the picture resized and cropped for the model: channels x height x width. Raises DataError."""
        picture = pictures.taken(row, self.config.data.image, self.where, number)
        try:
            made = self.tokenizer(picture, do_rescale=False, do_normalize=False, return_tensors="np")
        except ValueError as e:
            raise DataError(f"{self.where} row {number}: cannot be resized ({e}); mend or remove it") from None
        found: Array = np.asarray(made["pixel_values"][0]).astype(np.uint8)
        return found

    def _survey(self, found: Sequence[Shot]) -> None:
        self._labels = Labels(self.config.data)
        self._labels.settle(shot.label for shot in found)

    def _settled(self, found: Shot) -> Shot:
        return Shot(number=found.number, row=found.row, label=self._labels.number(found.label))

    def lengths(self, example: Shot) -> tuple[int, ...]:
        return ()

    def shown(self, example: Shot) -> tuple[str, str]:
        picture = pictures.taken(example.row, self.config.data.image, self.where, example.number)
        cell = example.row[self.config.data.image]
        _, height, width = self._pixels(example).shape
        name = cell.name if isinstance(cell, Picture) else f"row {example.number}"
        return f"{name}: {picture.width} x {picture.height} pixels, as {width} x {height}", str(example.label)

    def size(self, example: Shot) -> int:
        return 1

    def targets(self, example: Shot) -> int:
        return 1

    def ahead(self, examples: Sequence[Shot]) -> None:
        self._ahead.begin({e.number: e.row for e in examples if self._kept.get(e.number) is None})

    def _pixels(self, shot: Shot) -> Array:
        for known in (self._kept, self._ahead):
            if (found := known.get(shot.number)) is not None:
                return found
        return self._sized(shot.row, shot.number)

    def collate(self, examples: Sequence[Shot], device: torch.device) -> Batch:
        sized = [self._pixels(e) for e in examples]
        made = self.tokenizer(
            sized, do_resize=False, do_center_crop=False, input_data_format="channels_first", return_tensors="pt"
        )
        labels = torch.tensor([e.label for e in examples])
        return {"pixel_values": made["pixel_values"].float().to(device), "labels": labels.to(device)}

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._loss(self._logits(model, batch), batch)

    def _logits(self, model: Any, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(pixel_values=batch["pixel_values"]).logits
        return found.float()

    def _loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(logits, batch["labels"], reduction="sum")

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        logits = self._logits(model, batch)
        found = zip(batch["labels"].tolist(), logits.argmax(-1).tolist(), strict=True)
        return self._loss(logits, batch), list(found)

    def metrics(self, judged: Sequence[Any]) -> Mapping[str, float]:
        return {"accuracy": labelled.accuracy(judged), "macro_f1": labelled.macro_f1(judged)}

    def _head(self) -> dict[str, Any]:
        return self._labels.head()

    def _settle(self, model: Any) -> None:
        """Raise UserFault if the processor's picture size differs from the model's."""
        size = getattr(model.config, "image_size", None)
        wanted = (size, size) if isinstance(size, int) else tuple(size) if size else None
        made = self.tokenizer(np.zeros((8, 8, 3), np.uint8), return_tensors="np")["pixel_values"][0].shape
        if wanted and made[1:] != wanted:
            raise UserFault(
                f"train.model: preprocessor_config.json makes pictures of {made[2]} x {made[1]}, the model takes "
                f"{wanted[1]} x {wanted[0]}; set its size"
            )
