"""Rows as token ids with the loss on the completion only, and micro-batches padded to their longest row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.contract.data import DataError, check_templates, read_rows, render
from trainer.contract.train import TrainConfig
from trainer.faults import DataFault

IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row: `ids` of prompt and completion; the first `prompt` of them carry no loss."""

    ids: list[int]
    prompt: int

    @property
    def targets(self) -> int:
        """Tokens that carry loss; the first token of a row has nothing before it to be predicted from."""
        return len(self.ids) - max(1, self.prompt)


def encode(tokenizer: Any, prompt: str, completion: str, max_length: int) -> Example:
    """Tokenises the two parts apart, as at generation; ends with EOS; cut at the end to `max_length`."""
    head = list(tokenizer(prompt)["input_ids"]) if prompt else []
    if not head and tokenizer.bos_token_id is not None:
        head = [tokenizer.bos_token_id]
    tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        if head and head[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id:
            head.pop()
        tail.append(tokenizer.eos_token_id)
    return Example(ids=(head + tail)[:max_length], prompt=len(head))


def load(config: TrainConfig, path: Path, data_format: Any, tokenizer: Any) -> tuple[list[Example], int]:
    """(examples, how many rows were dropped because the cut left no completion). Raises DataFault."""
    examples = []
    dropped = 0
    try:
        for number, row in enumerate(read_rows(path.read_bytes(), data_format), 1):
            if number == 1:
                check_templates(config.data, frozenset(row))
            prompt, completion = render(config.data, row, number)
            example = encode(tokenizer, prompt, completion, config.max_length)
            if example.targets > 0:
                examples.append(example)
            else:
                dropped += 1
    except DataError as e:
        raise DataFault(str(e)) from None
    if not examples:
        raise DataFault(f"data: no row has a completion within max_length {config.max_length}; raise train.max_length")
    return examples, dropped


def collate(examples: Sequence[Example], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `labels` (rows x longest row, int64), padded on the right."""
    longest = max(len(e.ids) for e in examples)
    ids = torch.full((len(examples), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.tensor(example.ids)
        mask[row, :size] = 1
        labels[row, example.prompt : size] = ids[row, example.prompt : size]
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def micro_batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Cuts a global batch by length: rows of similar length together cost the least padding."""
    by_length = sorted(examples, key=lambda e: len(e.ids), reverse=True)
    return [by_length[i : i + size] for i in range(0, len(by_length), size)]
