"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306) on answers that are rated good or bad.

The reference is the model without its adapters, as in DPO.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainer.batching.examples import IGNORED, Example, collate, encode
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault, UserFault
from trainer.dataset import cells, ratings
from trainer.dataset.prompts import render
from trainer.models import auxiliary_losses
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.generation import ContinuationSamples
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.text.log_probabilities import answer_log_probabilities, frozen
from trainer.tasks.text.preference_pairs import AnswerData

OTHER = "other_"
"""Prefix of the tensors of prompts with the answer to another prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedAnswer:
    """Answer to a prompt, and whether it is good."""

    answer: Example
    good: bool
    chat: bool = False
    """True if the answer is an assistant's turn, rendered by the model's chat template."""
    other: list[int] = field(default_factory=list, compare=False)
    """Tokens of the answer to another prompt of the same step; empty outside of a step."""


class RatedData(AnswerData[RatedAnswer]):
    """Rated answers as token ids."""

    parsed_type = RatedAnswer
    answers = ("completion",)

    def parse_row(self, row: Row, number: int) -> RatedAnswer:
        config = self.config
        good = cells.required("flag", row, config.data.label, self.where, number)
        if (chats := self.chat_answers(row, number)) is not None:
            return RatedAnswer(answer=chats[0], good=good, chat=True)
        prompt, completion = render(config.data, row, number)
        return RatedAnswer(answer=encode(self.tokenizer, prompt, completion, config.max_length), good=good)

    def _survey(self, parsed: Sequence[RatedAnswer]) -> None:
        super()._survey(parsed)
        if self.config.global_batch == 1:
            raise UserFault(f"train.global_batch: {ratings.LONE_ANSWER}")
        good = sum(row.good for row in parsed)
        if good in (0, len(parsed)) and len(parsed):
            raise DataFault(ratings.one_sided_message(self.config.data.label, good=good > 0))
        if advice := ratings.unbalanced_message(self.config.kto, good, len(parsed) - good):
            self.reader.notice_all(advice)

    def sequences(self, parsed: RatedAnswer) -> tuple[Sequence[int], ...]:
        return (parsed.answer.ids,)

    def size(self, example: RatedAnswer) -> int:
        return len(example.answer.ids)

    def targets(self, example: RatedAnswer) -> int:
        return int(example.answer.targets > 0)

    def micro_batches(self, examples: Sequence[RatedAnswer], count: int) -> list[list[RatedAnswer]]:
        """Split a step's examples, and give each prompt the answer to the prompt before it."""
        parts = super().micro_batches(examples, count)
        ordered = [example for part in parts for example in part]
        before = [ordered[-1], *ordered[:-1]] if ordered else []
        paired = iter(
            [
                replace(e, other=other.answer.ids[other.answer.prompt :])
                for e, other in zip(ordered, before, strict=True)
            ]
        )
        return [[next(paired) for _ in part] for part in parts]

    def collate(self, examples: Sequence[RatedAnswer], device: torch.device) -> Batch:
        """Return the rated rows, `good`, and under OTHER the prompts with the answers to other prompts."""
        others = [_mismatched(example, self.limit) for example in examples]
        rated = collate([example.answer for example in examples], self.pad, device)
        other = {OTHER + name: tensor for name, tensor in collate(others, self.pad, device).items()}
        good = torch.tensor([example.good for example in examples], device=device)
        return {**rated, **other, "good": good}


class KtoModel(TaskModel[RatedData]):
    """Decoder with adapters. The loss of a row is that of the paper's equation 7, from 0 to its weight; it has no unit.

    The reference point is the mean over the rows of one forward pass, as in TRL. It is estimated from the answers to
    other prompts.
    """

    architecture = "AutoModelForCausalLM"
    peft_type = "CAUSAL_LM"

    def check_kind(self) -> None:
        super().check_kind()
        auxiliary_losses.check_none(self.config)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        return self._loss_sum(_gains(model, batch), batch)

    def compared_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return minus the log-probability of all answers: a merged model has no adapter to turn off."""
        return -answer_log_probabilities(model, batch).sum()

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[tuple[float, bool]]]:
        """Return the sum of the losses, and each row's gain over the reference point in nats with its rating."""
        gains = _gains(model, batch)
        return self._loss_sum(gains, batch), list(zip(gains.tolist(), batch["good"].tolist(), strict=True))

    def _loss_sum(self, gains: torch.Tensor, batch: Batch) -> torch.Tensor:
        kto, good = self.config.kto, batch["good"]
        weights = torch.where(good, kto.desirable_weight, kto.undesirable_weight)
        return (weights * torch.sigmoid(torch.where(good, -kto.beta, kto.beta) * gains)).sum()

    def metrics(self, judged: Sequence[tuple[float, bool]]) -> Mapping[str, float]:
        count = max(1, len(judged))
        means = [
            sum(gains) / max(1, len(gains))
            for gains in ([gain for gain, good in judged if good is rating] for rating in (True, False))
        ]
        accuracy = sum((gain > 0) == good for gain, good in judged) / count
        return {"accuracy": accuracy, "margin": means[0] - means[1]}


class KtoSamples(ContinuationSamples[RatedData]):
    """Continuations of prompts."""

    def _has_chats(self) -> bool:
        return self._data.has_chats

    def describe(self, parsed: RatedAnswer) -> tuple[str, str]:
        learned = self._data.tokenizer.decode([i for i in parsed.answer.labels if i != IGNORED])
        rating = "good" if parsed.good else "bad"
        return self._data.tokenizer.decode(parsed.answer.ids), f"{rating}: {learned}"


class Kto(Task[RatedAnswer]):
    """Kahneman-Tversky optimization."""

    def __init__(self, config: TrainConfig) -> None:
        data = RatedData(config)
        super().__init__(data, KtoModel(config, data), KtoSamples(config, data))


def _mismatched(example: RatedAnswer, limit: int) -> Example:
    """Return the prompt with the answer to another one, cut to the limit; with its own answer outside of a step."""
    if not example.other:
        return example.answer
    prompt = example.answer.prompt
    return Example(ids=[*example.answer.ids[:prompt], *example.other][:limit], prompt=prompt)


def _gains(model: Any, batch: Batch) -> torch.Tensor:
    """Return how much more likely each answer is than by the reference, less the reference point, in nats."""
    other = {name.removeprefix(OTHER): tensor for name, tensor in batch.items() if name.startswith(OTHER)}
    with frozen(model) as bare:
        with bare.disable_adapter():
            reference = answer_log_probabilities(bare, batch)
            drift = -answer_log_probabilities(bare, other)
        drift += answer_log_probabilities(bare, other)
    gained = answer_log_probabilities(model, batch) - reference
    return gained - drift.mean().clamp(min=0)
