"""Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691) on preference pairs, without a reference."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED
from trainer.contract.train import TrainConfig
from trainer.models import auxiliary_losses
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.text.dpo import DpoSamples
from trainer.tasks.text.log_probabilities import token_log_probabilities
from trainer.tasks.text.preference_pairs import Preference, PreferenceData

NEARLY_CERTAIN = -1e-6
"""Highest mean log-probability whose odds are computed; at 0 they are infinite."""


class OrpoModel(TaskModel[PreferenceData]):
    """Decoder. The loss of a pair is equation 6 of the paper, in nats.

    Its first part is the mean cross-entropy of the tokens of the prompt and the better answer, as in TRL.
    """

    architecture = "AutoModelForCausalLM"
    peft_type = "CAUSAL_LM"

    def check_kind(self) -> None:
        super().check_kind()
        auxiliary_losses.check_none(self.config)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._losses(model, batch)[0].sum()

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[float]]:
        """Return the sum of the losses, and the log of each pair's odds ratio."""
        losses, ratios = self._losses(model, batch)
        return losses.sum(), ratios.tolist()

    def _losses(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the log of the odds ratio of each pair."""
        is_token = batch["attention_mask"] > 0
        each = token_log_probabilities(model, batch, batch["input_ids"].masked_fill(~is_token, IGNORED))
        written = _means(each, is_token).chunk(2)[0]
        chosen, rejected = _means(each, batch["labels"] != IGNORED).chunk(2)
        ratios = log_odds(chosen) - log_odds(rejected)
        return -written - self.config.orpo.beta * functional.logsigmoid(ratios), ratios

    def metrics(self, judged: Sequence[float]) -> Mapping[str, float]:
        count = max(1, len(judged))
        return {"accuracy": sum(ratio > 0 for ratio in judged) / count, "log_odds_ratio": sum(judged) / count}


class Orpo(Task[Preference]):
    """Odds ratio preference optimization."""

    def __init__(self, config: TrainConfig) -> None:
        data = PreferenceData(config)
        super().__init__(data, OrpoModel(config, data), DpoSamples(config, data))


def _means(each: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the mean log-probability of the chosen tokens of each row."""
    chosen = chosen[:, 1:]
    return (each * chosen).sum(1) / chosen.sum(1).clamp(min=1)


def log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """Return the log of p / (1 - p)."""
    log_probability = log_probability.clamp(max=NEARLY_CERTAIN)
    return log_probability - torch.log(-torch.expm1(log_probability))
