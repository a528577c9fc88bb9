"""Peaks of memory, as the kernel counts them for a process."""

from pathlib import Path

import pytest


def _begins_anew() -> bool:
    """Return True if memory peaks can be reset; not every kernel and container permits that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


needs_a_new_peak = pytest.mark.skipif(
    not _begins_anew(), reason="this kernel lets no process begin its peak of memory anew (/proc/self/clear_refs)"
)
