"""Sampling order: the rows of a step are a pure function of seed and epoch, so the data cursor is a single number."""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.core.errors import UserFault
from trainer.dataset.example_counts import held_out_chats
from trainer.dataset.prompts import held_out


@lru_cache(maxsize=2)  # A step needs one epoch, or the end of one and the beginning of the next.
def _permutation(seed: int, epoch: int, rows: int) -> Any:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows)


def step_rows(seed: int, start: int, count: int, rows: int) -> list[int]:
    """Return the row numbers of samples `start`..`start + count` of the endless stream of epochs."""
    numbers: list[int] = []
    while len(numbers) < count:
        epoch, offset = divmod(start + len(numbers), rows)
        numbers += _permutation(seed, epoch, rows)[offset : offset + count - len(numbers)].tolist()
    return numbers


def check_rows_per_step(rows: int, batch: int) -> None:
    """Raise UserFault if there are so few training rows that one step would use a row twice."""
    if batch > rows:
        raise UserFault(
            f"train.global_batch: {rows} rows to train on are fewer than {batch}; lower it, or give more rows"
        )


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of the generators for micro-batch `number` of a step, counted over all processes.

    Dropout therefore does not depend on the number of processes or on a resume, and no generator state is saved.
    The seed has 32 bits, the limit of NumPy's generator and of torch's generator on the CPU.
    """
    return int(np.random.SeedSequence([seed, step, number]).generate_state(1)[0])


def row_seed(seed: int, step: int, row: int) -> int:
    """Return the seed of the generator for random values of a row in a step.

    It does not depend on the process or on the other rows of the batch. It has 32 bits, as `micro_batch_seed`, but
    gives another stream.
    """
    return int(np.random.SeedSequence([seed, step, row, 1]).generate_state(1)[0])


def split(
    seed: int, rows: int, eval_share: float, chats: Sequence[int] | None = None
) -> tuple["array[int]", "array[int]"]:
    """Return the numbers of the training rows and of the held-out rows.

    A positive share holds out at least one row and leaves at least one for training. `chats`: the chat of each row, if
    a chat has several rows, which are neighbours; then whole chats are held out.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 2**32]))
    if chats is not None:
        return _split_chats(generator, np.asarray(chats, dtype=np.uint64), eval_share)
    count = held_out(rows, eval_share)
    permutation = generator.permutation(rows).astype(np.uint64)
    return array("Q", np.sort(permutation[count:]).tobytes()), array("Q", np.sort(permutation[:count]).tobytes())


def _split_chats(generator: Any, chats: Any, eval_share: float) -> tuple["array[int]", "array[int]"]:
    """Return the numbers of the training rows and of the held-out rows, by the chat of each row."""
    starts = np.flatnonzero(np.r_[True, chats[1:] != chats[:-1]])
    sizes = np.diff(np.r_[starts, len(chats)])
    by_size = dict(zip(*(numbers.tolist() for numbers in np.unique(sizes, return_counts=True)), strict=True))
    order = generator.permutation(len(starts))
    is_held = np.zeros(len(starts), dtype=bool)
    for size, count in held_out_chats(by_size, eval_share).items():
        is_held[order[sizes[order] == size][:count]] = True
    is_heldout = np.repeat(is_held, sizes)
    training, held_rows = (np.flatnonzero(mask).astype(np.uint64).tobytes() for mask in (~is_heldout, is_heldout))
    return array("Q", training), array("Q", held_rows)
