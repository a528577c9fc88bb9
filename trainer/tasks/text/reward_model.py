"""Reward model on preference pairs (Bradley, Terry 1952; Christiano et al. 2017, arXiv 1706.03741)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import encode
from trainer.contract.train import TrainConfig
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples, evaluation_mode
from trainer.tasks.text.preference_pairs import Preference, PreferenceData, describe_pair


class RewardHead(TaskModel[PreferenceData]):
    """Model that returns one number for a text.

    The loss of a pair is minus the log-probability, in nats, that the chosen answer wins.
    """

    architecture = "AutoModelForSequenceClassification"
    peft_type = "SEQ_CLS"
    headed = True

    def _head_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "ignore_mismatched_sizes": True}

    def _configure(self, model: Any) -> None:
        model.config.pad_token_id = self._data.pad  # Decoders need it to find a row's last token.

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        chosen, rejected = _rewards(model, batch).chunk(2)
        return -functional.logsigmoid(chosen - rejected).sum()

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[tuple[float, float]]]:
        """Return the sum of the losses, and (chosen reward, rejected reward) of each pair."""
        chosen, rejected = _rewards(model, batch).chunk(2)
        pairs = list(zip(chosen.tolist(), rejected.tolist(), strict=True))
        return -functional.logsigmoid(chosen - rejected).sum(), pairs

    def metrics(self, judged: Sequence[tuple[float, float]]) -> Mapping[str, float]:
        count = max(1, len(judged))
        return {
            "accuracy": sum(chosen > rejected for chosen, rejected in judged) / count,
            "margin": sum(chosen - rejected for chosen, rejected in judged) / count,
        }


class RewardSamples(TaskSamples[PreferenceData]):
    """Reward of each prompt as text."""

    def describe(self, parsed: Preference) -> tuple[str, str]:
        return describe_pair(self._data.tokenizer, parsed)

    def check(self) -> None:
        for prompt in self.config.samples.prompts:
            self._data.check_prompt(prompt, encode(self._data.tokenizer, "", prompt, self.config.max_length).ids)

    def write(self, model: Any, device: torch.device) -> list[str]:
        prompts, length = self.config.samples.prompts, self.config.max_length
        with evaluation_mode(model):
            texts = [encode(self._data.tokenizer, "", prompt, length) for prompt in prompts]
            batches = [self._data.collate([Preference(chosen=text, rejected=text)], device) for text in texts]
            return [f"{float(_rewards(model, batch)[0]):.4g}" for batch in batches]


class RewardModel(Task[Preference]):
    """Task that learns the reward of a text from preference pairs."""

    def __init__(self, config: TrainConfig) -> None:
        data = PreferenceData(config)
        super().__init__(data, RewardHead(config, data), RewardSamples(config, data))


def _rewards(model: Any, batch: Batch) -> torch.Tensor:
    """Return the reward of each row, float32."""
    logits: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[:, 0].float()
