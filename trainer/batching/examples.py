"""Rows as token ids with a loss mask, and micro-batches padded to their longest row."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    chat: int = field(default=0, compare=False)
    """Number of the row, from 1, if the row is a chat with an example for each answer; 0 for other examples."""

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
    """Tokenise prompt and completion as one text, append EOS unless it ends so, and cut the end to `max_length`.

    The loss begins with the first token that has a character of the completion.
    """
    text, bos, eos = prompt + completion, tokenizer.bos_token_id, tokenizer.eos_token_id
    ids, has_loss = tokenised(tokenizer, text, [(len(prompt), len(text))], special=True)
    if bos is not None and ids[:1] != [bos] and not prompt:
        ids, has_loss = [bos, *ids], [False, *has_loss]
    if eos is not None:
        if ids[-1:] == [eos] and (bos != eos or len(ids) > 1):  # A single id may be BOS.
            ids, has_loss = ids[:-1], has_loss[:-1]
        ids, has_loss = [*ids, eos], [*has_loss, True]
    return example_of(ids[:max_length], has_loss[:max_length])


def example_of(ids: list[int], has_loss: Sequence[bool]) -> Example:
    """Return the example of token ids and whether each carries loss."""
    prompt = next((number for number, loss in enumerate(has_loss) if loss), len(ids))
    silent, start = [], None
    for number in range(prompt, len(ids) + 1):
        is_silent = number < len(ids) and not has_loss[number]
        if is_silent and start is None:
            start = number
        elif not is_silent and start is not None:
            silent.append((start, number))
            start = None
    return Example(ids=ids, prompt=prompt, silent=tuple(silent))


def tokenised(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], *, special: bool
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text, and whether each token has a character of one of the spans.

    `spans`: start and end in characters, in order. `special`: the tokenizer adds its special tokens, which are in no
    span. Without offsets, as in tokenizers of Python, a span begins where the tokens of the text before it end.
    """
    if not tokenizer.is_fast:
        return _tokenised_slowly(tokenizer, text, spans, special=special)
    encoded = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=special
    )
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    added = encoded["special_tokens_mask"] if special else [0] * len(ids)
    starts = [start for start, _ in spans]
    has_loss = []
    for (start, end), is_added in zip(offsets, added, strict=True):
        number = bisect_left(starts, max(end, start + 1)) - 1
        has_loss.append(number >= 0 and start < spans[number][1] and not (is_added and start == end))
    return ids, has_loss


def _tokenised_slowly(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], *, special: bool
) -> tuple[list[int], list[bool]]:
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    has_loss = [False] * len(ids)
    for start, end in spans:
        before, through = (tokenizer(text[:n], add_special_tokens=special)["input_ids"] for n in (start, end))
        first, after = _shared(ids, before), _shared(ids, through)
        has_loss[first:after] = [True] * (after - first)
    return ids, has_loss


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of leading ids that two sequences share."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((number for number, (id, other) in pairs if id != other), min(len(ids), len(others)))


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
