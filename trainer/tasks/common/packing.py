"""Packing of several rows into one sequence without attention between them.

The positions restart at 0 with each row, so transformers' masks (`find_packed_sequence_indices`) separate the rows,
also in models with a sliding window. The packs depend on the rows of a step alone, so packing does not affect the data
order, the cursor or a resume.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.batching.examples import IGNORED, Example, padded
from trainer.core.errors import UserFault

PROBE_LENGTH = 4
"""Tokens of the first row of the pack that `check` tries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Rows of a step that fit into one sequence, or a single row."""

    rows: tuple[Example, ...]

    @property
    def size(self) -> int:
        return sum(len(row.ids) for row in self.rows)

    @property
    def targets(self) -> int:
        return sum(row.targets for row in self.rows)


def packed(rows: Sequence[Example], capacity: int) -> list[Pack]:
    """Pack rows into sequences of `capacity` tokens by best fit, longest first.

    The number of sequences is at most 22 % above the optimum (Johnson 1973).
    """
    packs: list[list[Example]] = []
    free: list[tuple[int, int]] = []  # (free tokens, number of the pack), sorted
    for row in sorted(rows, key=lambda e: len(e.ids), reverse=True):
        tightest = bisect_left(free, (len(row.ids), -1))
        if tightest < len(free):
            left, number = free.pop(tightest)
            packs[number].append(row)
        else:
            left, number = max(capacity, len(row.ids)), len(packs)
            packs.append([row])
        insort(free, (left - len(row.ids), number))
    return [Pack(rows=tuple(pack)) for pack in packs]


def collate(packs: Sequence[Pack], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `position_ids` and `labels`: packs x longest pack, int64.

    The padding at the end has the positions of a separate row, and no loss.
    """
    longest = max(pack.size for pack in packs)
    ids, positions, labels = [], [], []
    for pack in packs:
        ids.append([i for row in pack.rows for i in row.ids])
        lengths = [len(row.ids) for row in pack.rows]
        positions.append([p for length in (*lengths, longest - pack.size) for p in range(length)])
        labels.append([i for row in pack.rows for i in (IGNORED, *row.labels[1:])])
    return {
        "input_ids": padded(ids, pad, device),
        "position_ids": padded(positions, 0, device),
        "labels": padded(labels, IGNORED, device),
    }


@torch.no_grad()
def check(model: Any, device: torch.device) -> None:
    """Raise UserFault for a model in which a row of a pack attends to the row before it.

    If only the tokens of the first row change, the second row's logits must keep every bit.
    """
    model.eval()
    try:
        is_separate = torch.equal(*(_second_row_logits(model, token, device) for token in (1, 2)))
    except TypeError:  # The model has no argument for positions.
        is_separate = False
    finally:
        model.train()
    if not is_separate:
        kind = model.config.model_type
        raise UserFault(f"train.packing: in a {kind} model packed rows would see each other; set it to false")


def _second_row_logits(model: Any, token: int, device: torch.device) -> torch.Tensor:
    """Return the logits of the second row of a pack whose first row repeats one token."""
    ids = torch.tensor([[token] * PROBE_LENGTH + [1, 2, 1, 2]], device=device)
    positions = torch.arange(PROBE_LENGTH, device=device).repeat(1, 2)
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions).logits
    return logits[:, PROBE_LENGTH:]
