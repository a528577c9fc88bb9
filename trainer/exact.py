"""Kernels that give the same bits each time, without which a resumed run may differ from one that nobody disturbed."""

import re
from collections.abc import Callable

import torch

from trainer import switches

LACKS = re.compile(r"(\S+) does not have a deterministic implementation")


def on() -> None:
    """From here on whatever has no such kernel raises RuntimeError. `warn_only` would not do: with it attention takes
    the kernels that add in any order."""
    torch.use_deterministic_algorithms(True)
    # Meant for finding bugs: it writes NaNs into every tensor that is made.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def settle(step: Callable[[], None]) -> None:
    """Takes a step that changes nothing. Where a part of the model has no such kernel, whatever is chosen by then goes
    on without, and a notice says so."""
    try:
        step()
    except RuntimeError as e:
        lacking = LACKS.search(str(e))
        if lacking is None:
            raise
        switches.notice(
            f"{lacking[1]} has no kernel here that gives the same bits each time, so a run that is resumed may differ "
            "from one that was not in the last of them"
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        step()
