"""Sampling order: the rows of a step are a pure function of seed and epoch, so the data cursor is a single number."""

from array import array
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.core.errors import UserFault
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


def split(seed: int, rows: int, eval_share: float) -> tuple["array[int]", "array[int]"]:
    """Return the numbers of the training rows and of the held-out rows.

    A positive share holds out at least one row and leaves at least one for training.
    """
    count = held_out(rows, eval_share)
    permutation = np.random.Generator(np.random.Philox(key=[seed, 2**32])).permutation(rows).astype(np.uint64)
    return array("Q", np.sort(permutation[count:]).tobytes()), array("Q", np.sort(permutation[:count]).tobytes())
