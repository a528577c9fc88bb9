"""Kernels that give the same bits each time, without which a resumed run may differ from one that nobody disturbed."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator

import torch

from trainer.models import accelerations as switches

LACKS = re.compile(r"(\S+) does not have a deterministic implementation")


def begin() -> None:
    """Such kernels where there are any, until it is known whether they can be insisted on. With `warn_only` attention
    may take kernels that add in any order, so this is not enough.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Meant for finding bugs: it writes NaNs into every tensor that is made.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def insist() -> None:
    """From here on whatever has no such kernel raises RuntimeError."""
    torch.use_deterministic_algorithms(True)


def lacking(step: Callable[[], None]) -> str:
    """What of a step has no such kernel; empty: all have. Nothing is broken off for it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
    found = [LACKS.search(str(one.message)) for one in told]
    for one, lacks in zip(told, found, strict=True):
        if lacks is None:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return next((lacks[1] for lacks in found if lacks), "")


def settle(lacks: str) -> None:
    """Insists, or says why not."""
    if not lacks:
        return insist()
    switches.notice(
        f"{lacks} has no kernel here that gives the same bits each time, so a run that is resumed may differ from one "
        "that was not in the last of them"
    )


@contextlib.contextmanager
def leniently() -> Iterator[None]:
    """Around what nothing is trained by."""
    insisted = torch.get_deterministic_debug_mode() == 2  # an error for each
    if insisted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if insisted:
            insist()
