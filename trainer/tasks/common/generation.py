"""Sample texts by greedy generation."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from trainer.contract.train import SamplesConfig, TrainConfig
from trainer.core.errors import UserFault
from trainer.models import max_positions
from trainer.tasks.common import chat_template
from trainer.tasks.common.answer_spans import REFUSALS
from trainer.tasks.common.task_data import TaskData
from trainer.tasks.common.task_model import D
from trainer.tasks.common.task_samples import TaskSamples, evaluation_mode


class ContinuationSamples(TaskSamples[D]):
    """Samples of a decoder: the continuation of each prompt, or the answer to it if the rows are chats."""

    @abstractmethod
    def _has_chats(self) -> bool:
        """Return True if the rows are chats. Call `TaskData.read` first."""

    def check(self) -> None:
        check_prompts(self.config, self._data, chat=self._has_chats())

    def write(self, model: Any, device: torch.device) -> list[str]:
        chat, samples, tokenizer = self._has_chats(), self.config.samples, self._data.tokenizer
        prompts = rendered(tokenizer, samples, chat=chat)
        return continuations(model, tokenizer, samples, device, prompts, special=not chat) if prompts else []


def rendered(tokenizer: Any, samples: SamplesConfig, *, chat: bool) -> tuple[str, ...]:
    """Return the prompts as the model receives them. `chat`: each prompt is one user turn. Raises UserFault."""
    if not chat:
        return samples.prompts
    try:
        return tuple(chat_template.render_question(tokenizer, prompt) for prompt in samples.prompts)
    except REFUSALS as e:
        reason = chat_template.first_line(e)
        raise UserFault(
            f"samples.prompts: the model's chat template refuses a chat of one user turn ({reason}); remove the prompts"
        ) from None


def check_prompts(config: TrainConfig, data: TaskData[Any], *, chat: bool = False) -> None:
    """Raise UserFault if the model cannot continue one of the prompts."""
    tokenizer, samples, limit = data.tokenizer, config.samples, max_positions.learned_positions(config)
    for prompt, text in zip(samples.prompts, rendered(tokenizer, samples, chat=chat), strict=True):
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        length = len(ids)
        if not length:
            raise UserFault(empty_prompt_message(prompt))
        data.check_prompt(prompt, ids)
        if limit is not None and length + samples.max_new_tokens - 1 > limit:
            raise UserFault(
                f"samples.prompts: {prompt[:40]!r} has {length} tokens, with max_new_tokens {samples.max_new_tokens} "
                f"more than the {limit} positions of {config.model!r}; lower samples.max_new_tokens, or shorten the "
                "prompt"
            )


def empty_prompt_message(prompt: str) -> str:
    """Return the error for a prompt without tokens, and the fix."""
    return f"samples.prompts: the tokenizer makes no token of {prompt[:40]!r}; add a word, or remove the prompt"


def continuations(
    model: Any,
    tokenizer: Any,
    samples: SamplesConfig,
    device: torch.device,
    prompts: Sequence[str],
    *,
    special: bool = True,
) -> list[str]:
    """Return the continuation of each prompt, generated in one left-padded batch.

    `special`: the tokenizer adds its special tokens; False for chats, whose template has already added them.
    """
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    with evaluation_mode(model):
        try:
            tokenizer.padding_side = "left"
            tokenizer.pad_token = pad or tokenizer.eos_token
            batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=special).to(device)
            batch.pop("token_type_ids", None)
            generated = model.generate(
                **batch,
                max_new_tokens=samples.max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        finally:
            tokenizer.padding_side, tokenizer.pad_token = side, pad
    new_tokens = generated[:, batch["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]
