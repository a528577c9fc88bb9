"""Which rows a step sees: a pure function of (seed, epoch), so the data cursor is one number of samples."""

from array import array
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.core.errors import UserFault
from trainer.dataset.prompts import held_out


@lru_cache(maxsize=2)  # a step asks for one epoch, or for the end of one and the beginning of the next
def _permutation(seed: int, epoch: int, rows: int) -> Any:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(rows)


def step_rows(seed: int, start: int, count: int, rows: int) -> list[int]:
    """Row numbers of samples `start`..`start + count` of the endless stream of epochs."""
    taken: list[int] = []
    while len(taken) < count:
        epoch, offset = divmod(start + len(taken), rows)
        taken += _permutation(seed, epoch, rows)[offset : offset + count - len(taken)].tolist()
    return taken


def insist_on_a_step(rows: int, batch: int) -> None:
    """Raises UserFault for rows to train on of which one step would see some twice."""
    if batch > rows:
        raise UserFault(
            f"train.global_batch: {rows} rows to train on are fewer than {batch}; lower it, or give more rows"
        )


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """What seeds the generators for micro-batch `number` of a step, counted over all processes.

    So dropout does not depend on how many processes there are or on when a run was resumed, and no generator is saved.
    32 bits, as torch's generator of the CPU and NumPy's take no more.
    """
    return int(np.random.SeedSequence([seed, step, number]).generate_state(1)[0])


def row_seed(seed: int, step: int, row: int) -> int:
    """What seeds the generator of what is drawn for a row in a step, wherever and beside whichever rows it is trained.

    32 bits, as `noise`; another stream than that one.
    """
    return int(np.random.SeedSequence([seed, step, row, 1]).generate_state(1)[0])


def split(seed: int, rows: int, eval_share: float) -> tuple["array[int]", "array[int]"]:
    """(training, held-out) row numbers. A positive share holds out one row at least and leaves one for training."""
    held = held_out(rows, eval_share)
    order = np.random.Generator(np.random.Philox(key=[seed, 2**32])).permutation(rows).astype(np.uint64)
    return array("Q", np.sort(order[held:]).tobytes()), array("Q", np.sort(order[:held]).tobytes())
