"""Texts that a model writes, greedily."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.contract.train import SamplesConfig


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
    """What follows each of `prompts`, all in one left-padded batch.

    `special`: the tokenizer adds its special tokens, which a chat template has written already.
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
