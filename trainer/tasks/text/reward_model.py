"""Reward model on preference pairs (Bradley, Terry 1952; Christiano et al. 2017, arXiv 1706.03741)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import encode
from trainer.tasks.common.base import Batch
from trainer.tasks.text.preference_pairs import Preference, Preferences


class RewardModel(Preferences):
    """Task for a model that returns one number for a text.

    The loss is minus the log-probability that the chosen answer of a pair wins, in nats.
    """

    architecture = "AutoModelForSequenceClassification"
    adapters = "SEQ_CLS"
    headed = True

    def _head(self) -> dict[str, Any]:
        return {"num_labels": 1, "ignore_mismatched_sizes": True}

    def _settle(self, model: Any) -> None:
        model.config.pad_token_id = self.pad  # Decoders find the last token by it.

    def _rewards(self, model: Any, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, 0].float()

    def _margins(self, model: Any, batch: Batch) -> torch.Tensor:
        chosen, rejected = self._rewards(model, batch).chunk(2)
        return chosen - rejected

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return -functional.logsigmoid(self._margins(model, batch)).sum()

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[tuple[float, float]]]:
        chosen, rejected = self._rewards(model, batch).chunk(2)
        pairs = list(zip(chosen.tolist(), rejected.tolist(), strict=True))
        return -functional.logsigmoid(chosen - rejected).sum(), pairs

    def metrics(self, judged: Sequence[tuple[float, float]]) -> Mapping[str, float]:
        count = max(1, len(judged))
        return {
            "accuracy": sum(better > worse for better, worse in judged) / count,
            "margin": sum(better - worse for better, worse in judged) / count,
        }

    @torch.no_grad()
    def write(self, model: Any, device: torch.device) -> list[str]:
        """Return the reward of each prompt as text."""
        model.eval()
        try:
            texts = [
                encode(self.tokenizer, "", prompt, self.config.max_length) for prompt in self.config.samples.prompts
            ]
            batches = [self.collate([Preference(chosen=text, rejected=text)], device) for text in texts]
            return [f"{float(self._rewards(model, batch)[0]):.4g}" for batch in batches]
        finally:
            model.train()
