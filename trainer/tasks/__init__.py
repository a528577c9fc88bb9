"""Kinds of fine-tunes: one `Task` for each `task` of the configuration.

A task has three parts: `TaskData` (examples and batches), `TaskModel` (loss, metrics, saved files) and `TaskSamples`
(output for people). The training loop works for all tasks and contains no task's name.
"""

from collections.abc import Callable
from typing import Any

from trainer.contract.train import TrainConfig
from trainer.tasks.common.task import Task
from trainer.tasks.image.image_classification import ImageClassification
from trainer.tasks.image.text_to_image import TextToImage
from trainer.tasks.text.causal_lm import CausalLm
from trainer.tasks.text.dpo import Dpo
from trainer.tasks.text.kto import Kto
from trainer.tasks.text.orpo import Orpo
from trainer.tasks.text.reward_model import RewardModel
from trainer.tasks.text.seq2seq import Seq2Seq
from trainer.tasks.text.text_classification import TextClassification
from trainer.tasks.text.text_regression import TextRegression
from trainer.tasks.text.token_classification import TokenClassification

TASKS: dict[str, Callable[[TrainConfig], Task[Any]]] = {
    "causal_lm": CausalLm,
    "text_classification": TextClassification,
    "text_regression": TextRegression,
    "token_classification": TokenClassification,
    "seq2seq": Seq2Seq,
    "dpo": Dpo,
    "orpo": Orpo,
    "kto": Kto,
    "reward_model": RewardModel,
    "image_classification": ImageClassification,
    "text_to_image": TextToImage,
}


def build_task(config: TrainConfig) -> Task[Any]:
    """Return the task that the configuration names."""
    return TASKS[config.task](config)
