"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) on preference pairs.

DPO needs no reward model. The reference is the model without its adapters, so memory holds no second model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.train import TrainConfig
from trainer.models import auxiliary_losses
from trainer.tasks.common.generation import ContinuationSamples
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.text.log_probabilities import answer_log_probabilities, frozen
from trainer.tasks.text.preference_pairs import Preference, PreferenceData, describe_pair


class DpoModel(TaskModel[PreferenceData]):
    """Decoder with adapters. The loss of a pair is equation 7 of the paper, in nats."""

    architecture = "AutoModelForCausalLM"
    peft_type = "CAUSAL_LM"

    def check_kind(self) -> None:
        super().check_kind()
        auxiliary_losses.check_none(self.config)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._loss_sum(_margins(model, batch))

    def compared_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return minus the log-probability of all answers: a merged model has no adapter to turn off."""
        return -answer_log_probabilities(model, batch).sum()

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[float]]:
        """Return the sum of the losses, and the margin of each pair in nats."""
        margins = _margins(model, batch)
        return self._loss_sum(margins), margins.tolist()

    def _loss_sum(self, margins: torch.Tensor) -> torch.Tensor:
        return -functional.logsigmoid(self.config.dpo.beta * margins).sum()

    def metrics(self, judged: Sequence[float]) -> Mapping[str, float]:
        count = max(1, len(judged))
        return {"accuracy": sum(m > 0 for m in judged) / count, "margin": sum(judged) / count}


class DpoSamples(ContinuationSamples[PreferenceData]):
    """Continuations of prompts."""

    def _has_chats(self) -> bool:
        return self._data.has_chats

    def describe(self, parsed: Preference) -> tuple[str, str]:
        return describe_pair(self._data.tokenizer, parsed)


class Dpo(Task[Preference]):
    """Direct preference optimization."""

    def __init__(self, config: TrainConfig) -> None:
        data = PreferenceData(config)
        super().__init__(data, DpoModel(config, data), DpoSamples(config, data))


def _margins(model: Any, batch: Batch) -> torch.Tensor:
    """Return for each pair how much more the model prefers the chosen answer than the reference does, in nats."""
    with frozen(model) as bare, bare.disable_adapter():
        reference = answer_log_probabilities(bare, batch)
    gained = answer_log_probabilities(model, batch) - reference
    chosen, rejected = gained.chunk(2)
    return chosen - rejected
