"""Rows laid end to end in one sequence, each seeing only itself.

The positions start anew with each row, by which transformers' own masks (`find_packed_sequence_indices`) keep the rows
apart, also where a model looks back through a window. Which rows lie together follows from the rows of a step alone,
so the order of the data, the cursor and resume know nothing of it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.batching.examples import IGNORED, Example, padded
from trainer.core.errors import UserFault

PROBED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Some rows of a step; all of them fit into one sequence, unless it is a single one."""

    rows: tuple[Example, ...]

    @property
    def size(self) -> int:
        return sum(len(row.ids) for row in self.rows)

    @property
    def targets(self) -> int:
        return sum(row.targets for row in self.rows)


def packed(rows: Sequence[Example], room: int) -> list[Pack]:
    """Best fit, longest rows first (Johnson 1973): within 22 % of the fewest sequences of `room` tokens."""
    packs: list[list[Example]] = []
    free: list[tuple[int, int]] = []
    for row in sorted(rows, key=lambda e: len(e.ids), reverse=True):
        found = bisect_left(free, (len(row.ids), -1))
        if found < len(free):
            left, number = free.pop(found)
            packs[number].append(row)
        else:
            left, number = max(room, len(row.ids)), len(packs)
            packs.append([row])
        insort(free, (left - len(row.ids), number))
    return [Pack(rows=tuple(pack)) for pack in packs]


def collate(packs: Sequence[Pack], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids`, `position_ids`, `labels`; what pads the end is a row of its own, which carries no loss."""
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
    """Raises UserFault for a model in which a row of a pack sees the one before it: other tokens there must not change
    a bit of what it computes.
    """
    model.eval()
    try:
        apart = torch.equal(*(_second(model, other, device) for other in (1, 2)))
    except TypeError:  # it takes no positions
        apart = False
    finally:
        model.train()
    if not apart:
        kind = model.config.model_type
        raise UserFault(f"train.packing: in a {kind} model packed rows would see each other; set it to false")


def _second(model: Any, other: int, device: torch.device) -> torch.Tensor:
    """What is computed for the second row of a pack after a first one of `other` tokens."""
    ids = torch.tensor([[other] * PROBED + [1, 2, 1, 2]], device=device)
    positions = torch.arange(PROBED, device=device).repeat(1, 2)
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions).logits
    return logits[:, PROBED:]
