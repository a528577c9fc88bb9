"""Output of a task for people: samples of the model during an evaluation, and rows rendered as text."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

import torch

from trainer.contract.train import TrainConfig
from trainer.tasks.common.task_model import D


class TaskSamples(ABC, Generic[D]):
    """Samples of a task: one output of the model for each configured prompt. `D` is the task's data."""

    keeps_base_samples = True
    """True if the untuned model's samples are small enough for every checkpoint of a full fine-tune."""

    def __init__(self, config: TrainConfig, data: D) -> None:
        self.config, self._data = config, data

    @abstractmethod
    def describe(self, parsed: Any) -> tuple[str, str]:
        """Return the model's input and target of a parsed row, as text."""

    def check(self) -> None:
        """Raise UserFault if `write` cannot use the configured prompts. Call `TaskData.read` first."""

    def write(self, model: Any, device: torch.device) -> list[str]:
        """Return the model's output for each configured prompt: text, or a PNG file in base64."""
        return []

    def save_files(self, folder: Path, samples: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the content of `samples.json`, and write further files of the samples to the folder.

        `samples`: `prompt`, `base` (output of the untuned model) and `tuned` of each prompt.
        """
        return samples


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch the model to evaluation without gradients within the block, and to training after it."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
