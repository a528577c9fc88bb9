"""Greedy generation of sample texts."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.contract.train import SamplesConfig, TrainConfig
from trainer.core.errors import UserFault
from trainer.models import max_positions as positions
from trainer.tasks.common import chat_template as chats


def rendered(tokenizer: Any, samples: SamplesConfig, *, chat: bool) -> tuple[str, ...]:
    """Return the prompts as the model reads them. `chat`: each is one turn of the user. Raises UserFault."""
    if not chat:
        return samples.prompts
    try:
        return tuple(chats.asked(tokenizer, prompt) for prompt in samples.prompts)
    except chats.REFUSALS as e:
        raise UserFault(
            f"samples.prompts: the model's chat template refuses a lone turn of the user ({chats.line(e)}); remove them"
        ) from None


def check(config: TrainConfig, tokenizer: Any, *, chat: bool = False) -> None:
    """Raise UserFault if the model cannot continue one of the prompts."""
    samples, reach = config.samples, positions.learned(config)
    for prompt, text in zip(samples.prompts, rendered(tokenizer, samples, chat=chat), strict=True):
        length = len(tokenizer(text, add_special_tokens=not chat)["input_ids"])
        if not length:
            raise UserFault(blank(prompt))
        if reach is not None and length + samples.max_new_tokens - 1 > reach:
            raise UserFault(
                f"samples.prompts: {prompt[:40]!r} has {length} tokens, with max_new_tokens {samples.max_new_tokens} "
                f"more than the {reach} positions of {config.model!r}; lower samples.max_new_tokens, or shorten it"
            )


def blank(prompt: str) -> str:
    """Return the error for a prompt without tokens, and the fix."""
    return f"samples.prompts: the tokenizer makes no token of {prompt[:40]!r}; give it a word, or remove it"


@torch.no_grad()
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

    `special`: True if the tokenizer adds its special tokens; a chat template has already written them.
    """
    model.eval()
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side = "left"
    tokenizer.pad_token = pad or tokenizer.eos_token
    try:
        batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=special).to(device)
        batch.pop("token_type_ids", None)
        out = model.generate(
            **batch,
            max_new_tokens=samples.max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    finally:
        tokenizer.padding_side, tokenizer.pad_token = side, pad
        model.train()
    written = out[:, batch["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
