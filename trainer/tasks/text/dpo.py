"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) on preference pairs.

It needs no reward model. The reference is the base under the adapters, so there is no second model in memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED
from trainer.tasks.common import generation as writing
from trainer.tasks.common.base import Batch
from trainer.tasks.text.preference_pairs import Preferences


class Dpo(Preferences):
    """Task with the loss of a pair, equation 7 of the paper."""

    architecture = "AutoModelForCausalLM"
    adapters = "CAUSAL_LM"

    def check_samples(self) -> None:
        writing.check(self.config, self.tokenizer, chat=self.chatty)

    def _margins(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return for each pair how much more the model prefers the chosen answer than the reference does, in nats."""
        bare = getattr(model, "module", model)
        training = bare.training
        bare.eval()
        with torch.no_grad(), bare.disable_adapter():
            reference = _log_probabilities(bare, batch)
        bare.train(training)
        gained = _log_probabilities(model, batch) - reference
        chosen, rejected = gained.chunk(2)
        return chosen - rejected

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return -functional.logsigmoid(self.config.dpo.beta * self._margins(model, batch)).sum()

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[float]]:
        margins = self._margins(model, batch)
        return -functional.logsigmoid(self.config.dpo.beta * margins).sum(), margins.tolist()

    def metrics(self, judged: Sequence[float]) -> Mapping[str, float]:
        count = max(1, len(judged))
        return {"accuracy": sum(m > 0 for m in judged) / count, "margin": sum(judged) / count}

    def write(self, model: Any, device: torch.device) -> list[str]:
        samples = self.config.samples
        prompts = writing.rendered(self.tokenizer, samples, chat=self.chatty)
        if not prompts:
            return []
        return writing.continuations(model, self.tokenizer, samples, device, prompts, special=not self.chatty)


def _log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each row's answer in nats, float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    wanted = batch["labels"][:, 1:]
    each = functional.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
    return -each.sum(1)
