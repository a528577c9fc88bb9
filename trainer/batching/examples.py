"""Rows as token ids with a loss mask, and micro-batches padded to their longest row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

IGNORED = -100
E = TypeVar("E")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Row with the token `ids` of prompt and completion; the first `prompt` and the `silent` ids have no loss."""

    ids: list[int]
    prompt: int
    silent: tuple[tuple[int, int], ...] = ()
    """Spans (start, end) after the prompt: the turns of a chat that are not the assistant's."""

    @property
    def targets(self) -> int:
        """Number of tokens with loss; a row's first token has none, because no token precedes it."""
        return len(self.ids) - max(1, self.prompt) - sum(end - start for start, end in self.silent)

    @property
    def labels(self) -> list[int]:
        """Token ids, with IGNORED for ids without loss."""
        labels = [IGNORED] * min(self.prompt, len(self.ids)) + self.ids[self.prompt :]
        for start, end in self.silent:
            labels[start:end] = [IGNORED] * (end - start)
        return labels


def encode(tokenizer: Any, prompt: str, completion: str, max_length: int) -> Example:
    """Tokenise the two parts separately, as at generation, append EOS, and cut the end to `max_length`."""
    head = list(tokenizer(prompt)["input_ids"]) if prompt else []
    if not head and tokenizer.bos_token_id is not None:
        head = [tokenizer.bos_token_id]
    tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        if head and head[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id:
            head.pop()
        tail.append(tokenizer.eos_token_id)
    return Example(ids=(head + tail)[:max_length], prompt=len(head))


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of rows x longest row, int64, padded on the right."""
    longest = max(len(row) for row in rows)
    filled = torch.full((len(rows), longest), pad, dtype=torch.long)
    for number, row in enumerate(rows):
        filled[number, : len(row)] = torch.tensor(row)
    return filled.to(device)


def collate(examples: Sequence[Example], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `attention_mask` and `labels` (rows x longest row, int64), padded on the right."""
    return {
        "input_ids": padded([e.ids for e in examples], pad, device),
        "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
        "labels": padded([e.labels for e in examples], IGNORED, device),
    }


def by_size(examples: Sequence[E], count: int, size: Callable[[E], int]) -> list[list[E]]:
    """Split a global batch by length, because rows of similar length need the least padding."""
    ordered = sorted(examples, key=size, reverse=True)
    return [ordered[i : i + count] for i in range(0, len(ordered), count)]


def micro_batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Split rows of text by their number of tokens; see `by_size`."""
    return by_size(examples, size, lambda e: len(e.ids))
