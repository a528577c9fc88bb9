"""Writes results with retries. A job whose results cannot be written does not succeed."""

import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from trainer.core import disk_space
from trainer.core.errors import Fault

PAUSES_S = (0.5, 1.0, 2.0)
"""Seconds before each repeated attempt. Attempts do not count while other checkpoints are uploaded, because each
upload frees disk space.
"""
TIMEOUT_S = 3 * 3600.0
"""Longest wait, in seconds, for uploads that free a full disk. An upload that needs another machine's part may never
end.
"""


class ResultsNotWritten(Fault):
    """The disk did not accept the results."""


def write_with_retries(
    action: Callable[[], str],
    *,
    agree: Callable[[bool], bool],
    waiting: Callable[[], bool],
    leave: Callable[[], None],
    report: Callable[[str, str], None],
    folder: Path,
    needed_bytes: Callable[[], int],
) -> None:
    """Repeat `action` in all processes until it succeeds in all. `action` returns why it failed, or an empty text.

    `agree`: returns True in all processes if one process passes True. `waiting`: returns True while checkpoints on this
    disk wait for their upload. `leave`: called in all processes before another attempt; may raise. `folder`: target
    folder. `needed_bytes`: returns the bytes that the results need.

    Raises: ResultsNotWritten for all.
    """
    tries, began = 0, time.monotonic()
    while True:
        why = action()
        if not agree(bool(why)):
            return
        if why:
            report("save_failed", f"the results could not be written: {why}")
        if not agree(bool(why) and waiting() and time.monotonic() - began < TIMEOUT_S):
            tries += 1
        if tries > len(PAUSES_S):
            last = why or "by another process"
            space = disk_space.disk_full_message(folder, needed_bytes())
            raise ResultsNotWritten(f"the results could not be written, last: {last}; {space}")
        time.sleep(PAUSES_S[max(0, tries - 1)])
        leave()


def try_write(action: Callable[[], None]) -> str:
    """Return why an action failed on its disk; empty: it succeeded."""
    try:
        action()
    except (OSError, SafetensorError) as e:
        return f"{type(e).__name__}: {e}"
    return ""
