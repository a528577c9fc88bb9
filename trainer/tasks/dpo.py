"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290): the better of two answers, without a reward
model. The reference is the base under the adapters, so there is no second model in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.data import render_preference
from trainer.dataset import IGNORED, Example, collate, encode
from trainer.tasks.base import Batch, Row, Task
from trainer.tasks.writing import continuations


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example


class Dpo(Task[Preference]):
    """The loss is that of a pair, equation 7 of the paper."""

    architecture = "AutoModelForCausalLM"
    adapters = "CAUSAL_LM"

    def example(self, row: Row, number: int) -> Preference:
        config = self.config
        prompt, chosen, rejected = render_preference(config.data, row, number)
        return Preference(
            chosen=encode(self.tokenizer, prompt, chosen, config.max_length),
            rejected=encode(self.tokenizer, prompt, rejected, config.max_length),
        )

    def lengths(self, example: Preference) -> tuple[int, ...]:
        return len(example.chosen.ids), len(example.rejected.ids)

    def shown(self, example: Preference) -> tuple[str, str]:
        answer = self.tokenizer.decode([i for i in example.rejected.labels if i != IGNORED])
        return self.tokenizer.decode(example.chosen.ids), f"rather than {answer}"

    def _nothing(self) -> str:
        return f"data: no row has two answers within max_length {self.config.max_length}; raise train.max_length"

    def size(self, example: Preference) -> int:
        return len(example.chosen.ids) + len(example.rejected.ids)

    def targets(self, example: Preference) -> int:
        return int(example.chosen.targets > 0 and example.rejected.targets > 0)

    def collate(self, examples: Sequence[Preference], device: torch.device) -> Batch:
        """The chosen answers first, then the rejected ones in the same order."""
        return collate([e.chosen for e in examples] + [e.rejected for e in examples], self.pad, device)

    def _margins(self, model: Any, batch: Batch) -> torch.Tensor:
        """How much more than the reference the model prefers the chosen answer, in nats, for each pair."""
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
        return continuations(model, self.tokenizer, samples, device, samples.prompts) if samples.prompts else []


def _log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Of each row's answer, in nats, float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    wanted = batch["labels"][:, 1:]
    each = functional.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
    return -each.sum(1)
