"""Deterministic kernels, without which a resumed run may differ from an uninterrupted run."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator

import torch

from trainer.models import accelerations

NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


def begin() -> None:
    """Prefer deterministic kernels until `require` is called.

    A preference is not enough: with `warn_only`, attention may use kernels whose order of additions varies.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Meant for debugging: it writes NaNs into every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def require() -> None:
    """Require deterministic kernels: from now on an operation without a deterministic kernel raises RuntimeError."""
    torch.use_deterministic_algorithms(True)


def first_nondeterministic_operation(step: Callable[[], None]) -> str:
    """Run `step` to its end and return its first operation without a deterministic kernel.

    Empty: all operations have a deterministic kernel.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    matches = [NO_KERNEL.search(str(warning.message)) for warning in caught]
    for warning, match in zip(caught, matches, strict=True):
        if match is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return next((match[1] for match in matches if match), "")


def require_or_report(lacks: str) -> None:
    """Require deterministic kernels, or report why that is impossible."""
    if not lacks:
        return require()
    accelerations.notice(
        f"{lacks} has no kernel here that gives the same bits each time; a resumed run may differ from an uninterrupted"
        " run in the last bits"
    )


@contextlib.contextmanager
def leniently() -> Iterator[None]:
    """Context manager that allows nondeterministic kernels in code that trains nothing."""
    was_required = torch.get_deterministic_debug_mode() == 2  # a nondeterministic operation raises
    if was_required:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if was_required:
            require()
