"""Rows as token ids with the loss on what is to be learned only, and micro-batches padded to their longest row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

IGNORED = -100
E = TypeVar("E")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row: `ids` of prompt and completion; the first `prompt` of them carry no loss, nor do `silent` ones."""

    ids: list[int]
    prompt: int
    silent: tuple[tuple[int, int], ...] = ()
    """Spans (start, end) after the prompt: of a chat, what others than the assistant say."""

    @property
    def targets(self) -> int:
        """Tokens that carry loss; the first token of a row has nothing before it to be predicted from."""
        return len(self.ids) - max(1, self.prompt) - sum(end - start for start, end in self.silent)

    @property
    def labels(self) -> list[int]:
        """The ids, IGNORED where there is no loss."""
        found = [IGNORED] * min(self.prompt, len(self.ids)) + self.ids[self.prompt :]
        for start, end in self.silent:
            found[start:end] = [IGNORED] * (end - start)
        return found


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


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> torch.Tensor:
    """Rows x longest row, int64, padded on the right."""
    longest = max(len(row) for row in rows)
    filled = torch.full((len(rows), longest), pad, dtype=torch.long)
    for number, row in enumerate(rows):
        filled[number, : len(row)] = torch.tensor(row)
    return filled.to(device)


def collate(examples: Sequence[Example], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `labels` (rows x longest row, int64), padded on the right."""
    return {
        "input_ids": padded([e.ids for e in examples], pad, device),
        "attention_mask": padded([[1] * len(e.ids) for e in examples], 0, device),
        "labels": padded([e.labels for e in examples], IGNORED, device),
    }


def by_size(examples: Sequence[E], count: int, size: Callable[[E], int]) -> list[list[E]]:
    """Cuts a global batch by length: rows of similar length together cost the least padding."""
    ordered = sorted(examples, key=size, reverse=True)
    return [ordered[i : i + count] for i in range(0, len(ordered), count)]


def micro_batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """`by_size` of rows of text."""
    return by_size(examples, size, lambda e: len(e.ids))
