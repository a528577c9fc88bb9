"""`Task`: the interface between the training loop and a kind of fine-tune."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic

from trainer.tasks.common.example_reader import RowObserver
from trainer.tasks.common.task_data import E, TaskData
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples


class Task(Generic[E]):
    """One kind of fine-tune, composed of three parts; `E` is one of its examples.

    `data` uses neither of the other parts. `model` and `samples` use `data`.
    """

    def __init__(self, data: TaskData[E], model: TaskModel[Any], samples: TaskSamples[Any]) -> None:
        self.data, self.model, self.samples = data, model, samples

    def examples(
        self,
        path: Path,
        data_format: Any,
        observe: RowObserver | None = None,
        *,
        cache: Path | None = None,
        data_sha256: str = "",
    ) -> tuple[Sequence[E], int]:
        """Check the model's kind, read the data set as `TaskData.read` does, and check the prompts of samples.

        Raises UserFault and DataFault.
        """
        self.model.check_kind()
        examples, without_target = self.data.read(path, data_format, observe, cache=cache, data_sha256=data_sha256)
        self.samples.check()
        return examples, without_target
