"""Image classification."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.dataset import cells
from trainer.dataset.archives import Picture
from trainer.dataset.prompts import DataError
from trainer.models import loading
from trainer.tasks.common import forward_check, image_loading, label_metrics
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.image_loading import Array, ImageCache, ImagePrefetcher
from trainer.tasks.common.label_metrics import Labels
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch, TaskData
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples

ARCHITECTURE = "AutoModelForImageClassification"
CHANNELS = 3
"""Channels of the pictures that `image_loading` returns: RGB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledImage:
    """Picture and its class."""

    number: int
    """Row number, from 1."""
    row: Row
    label: Any
    """Name of the class in a parsed row; number of the class in an example."""


class ImageClassData(TaskData[LabelledImage]):
    """Pictures, and the class of each. `tokenizer` is the image processor, so that it is saved with the model."""

    prepares_ahead = True

    labels: Labels
    """Classes. Set by `read`."""

    def _prepare(self) -> None:
        """Load the model's image processor. Raises UserFault."""
        self.tokenizer = loading.image_processor_of(self.config)
        self._check_processor()
        self._cache = ImageCache()
        self._prefetcher = ImagePrefetcher(self._resized, image_loading.spare_threads())

    def _check_processor(self) -> None:
        """Raise UserFault if the processor cannot make the pictures that the model takes."""
        model = loading.config_of(self.config)
        channels = getattr(model, "num_channels", CHANNELS)
        if channels != CHANNELS:
            raise UserFault(
                f"train.model: {self.config.model!r} takes pictures of {channels} channels, and pictures are read in "
                f"RGB; take a model of {CHANNELS} channels"
            )
        try:
            processed = self.tokenizer(np.zeros((8, 8, CHANNELS), np.uint8), return_tensors="np")
        except ValueError as e:
            raise UserFault(
                f"train.model: preprocessor_config.json does not fit pictures of {CHANNELS} channels ({e}); mend its "
                "image_mean and image_std"
            ) from None
        self._check_size(model, processed["pixel_values"][0].shape)

    def _check_size(self, model: Any, shape: tuple[int, ...]) -> None:
        """Raise UserFault for pictures of another size than the model's, unless it takes any size, as ConvNeXt does."""
        size = getattr(model, "image_size", None)
        expected = (size, size) if isinstance(size, int) else tuple(size) if size else None
        if not expected or shape[1:] == expected:
            return
        try:
            hollow = loading.hollow(self.config, ARCHITECTURE)
            forward_check.forward(hollow, pixel_values=torch.zeros((1, *shape), device="meta", dtype=hollow.dtype))
        except forward_check.ForwardUnknown:
            return
        except forward_check.ForwardRefused:
            raise UserFault(
                f"train.model: preprocessor_config.json makes pictures of {shape[2]} x {shape[1]}, the model takes "
                f"{expected[1]} x {expected[0]}; set its size"
            ) from None

    def parse_row(self, row: Row, number: int) -> LabelledImage:
        data = self.config.data
        label = cells.required("label", row, data.label, self.where, number)
        label = cells.known_labels((label,), data.labels, self.where, number)[0]
        self._cache.offer(number, self._resized(row, number))
        return LabelledImage(number=number, row={data.image: row[data.image]}, label=label)

    def _resized(self, row: Row, number: int) -> Array:
        """Return the picture resized and cropped for the model: channels x height x width. Raises DataError."""
        picture = image_loading.image_of(row, self.config.data.image, self.where, number)
        try:
            batch = self.tokenizer(picture, do_rescale=False, do_normalize=False, return_tensors="np")
        except ValueError as e:
            raise DataError(f"{self.where} row {number}: cannot be resized ({e}); mend or remove it") from None
        pixels: Array = np.asarray(batch["pixel_values"][0]).astype(np.uint8)
        return pixels

    def _survey(self, parsed: Sequence[LabelledImage]) -> None:
        self.labels = Labels(self.config.data, loading.head_labels(self.config), self.reader.notice_all)
        self.labels.collect(image.label for image in parsed)

    def _example(self, parsed: LabelledImage) -> LabelledImage:
        return LabelledImage(number=parsed.number, row=parsed.row, label=self.labels.number(parsed.label))

    def lengths(self, parsed: LabelledImage) -> tuple[int, ...]:
        return ()

    def size(self, example: LabelledImage) -> int:
        return 1

    def targets(self, example: LabelledImage) -> int:
        return 1

    def prepare_ahead(self, examples: Sequence[LabelledImage]) -> None:
        self._prefetcher.begin({e.number: e.row for e in examples if self._cache.get(e.number) is None})

    def pixels(self, image: LabelledImage) -> Array:
        """Return the picture as the model sees it, before normalisation: channels x height x width, 0 to 255."""
        for source in (self._cache, self._prefetcher):
            if (pixels := source.get(image.number)) is not None:
                return pixels
        return self._resized(image.row, image.number)

    def collate(self, examples: Sequence[LabelledImage], device: torch.device) -> Batch:
        """Return `pixel_values` (rows x channels x height x width, float32) and `labels` (rows, int64)."""
        batch = self.tokenizer(
            [self.pixels(e) for e in examples],
            do_resize=False, do_center_crop=False, input_data_format="channels_first", return_tensors="pt",
        )  # fmt: skip
        labels = torch.tensor([e.label for e in examples])
        return {"pixel_values": batch["pixel_values"].float().to(device), "labels": labels.to(device)}


class ImageClassModel(TaskModel[ImageClassData]):
    """Model with one output for each class. The loss of a row is the cross-entropy of its class in nats."""

    architecture = ARCHITECTURE
    unfit_hint = "set preprocessor_config.json to the pictures that config.json describes"
    peft_type = None
    headed = True

    def _head_options(self) -> dict[str, Any]:
        return self._data.labels.head_options()

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(_logits(model, batch), batch["labels"], reduction="sum")

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[tuple[int, int]]]:
        """Return the sum of the losses, and (class, predicted class) of each row."""
        logits = _logits(model, batch)
        pairs = zip(batch["labels"].tolist(), logits.argmax(-1).tolist(), strict=True)
        return functional.cross_entropy(logits, batch["labels"], reduction="sum"), list(pairs)

    def metrics(self, judged: Sequence[tuple[int, int]]) -> Mapping[str, float]:
        return {"accuracy": label_metrics.accuracy(judged), "macro_f1": label_metrics.macro_f1(judged)}


class ImageClassSamples(TaskSamples[ImageClassData]):
    """Descriptions of rows; a configuration with prompts is refused."""

    def describe(self, parsed: LabelledImage) -> tuple[str, str]:
        data = self._data
        column = data.config.data.image
        picture = image_loading.image_of(parsed.row, column, data.where, parsed.number)
        cell = parsed.row[column]
        _, height, width = data.pixels(parsed).shape
        name = cell.name if isinstance(cell, Picture) else f"row {parsed.number}"
        return f"{name}: {picture.width} x {picture.height} pixels, as {width} x {height}", str(parsed.label)


class ImageClassification(Task[LabelledImage]):
    """Task that predicts a class for each picture."""

    data: ImageClassData

    def __init__(self, config: TrainConfig) -> None:
        data = ImageClassData(config)
        super().__init__(data, ImageClassModel(config, data), ImageClassSamples(config, data))


def _logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return the outputs for each class: rows x classes, float32."""
    logits: torch.Tensor = model(pixel_values=batch["pixel_values"]).logits
    return logits.float()
