"""Deterministic kernels, without which a resumed run may differ from an uninterrupted run."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator

import torch

from trainer.models import accelerations

LACKS = re.compile(r"(\S+) does not have a deterministic implementation")


def begin() -> None:
    """Prefer deterministic kernels until `insist` can require them.

    With `warn_only` attention may use kernels that add in any order, so this is not enough.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Meant for debugging: it writes NaNs into every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def insist() -> None:
    """Require deterministic kernels: an operation without one raises RuntimeError from here on."""
    torch.use_deterministic_algorithms(True)


def lacking(step: Callable[[], None]) -> str:
    """Return the operations of a step without a deterministic kernel; empty: none. The step is not interrupted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    matches = [LACKS.search(str(warning.message)) for warning in caught]
    for warning, match in zip(caught, matches, strict=True):
        if match is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return next((match[1] for match in matches if match), "")


def settle(lacks: str) -> None:
    """Require deterministic kernels, or report why that is impossible."""
    if not lacks:
        return insist()
    accelerations.notice(
        f"{lacks} has no kernel here that gives the same bits each time, so a run that is resumed may differ from one "
        "that was not in the last of them"
    )


@contextlib.contextmanager
def leniently() -> Iterator[None]:
    """Context manager that allows other kernels in code that trains nothing."""
    insisted = torch.get_deterministic_debug_mode() == 2  # raises for each such operation
    if insisted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if insisted:
            insist()
