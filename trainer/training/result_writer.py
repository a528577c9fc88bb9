"""The results reach the disk, or the job does not succeed."""

import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from trainer.core import disk_space as room
from trainer.core.errors import Fault

PAUSES_S = (0.5, 1.0, 2.0)
"""Before what failed is tried again; while others are uploaded, which gives room on a full disk, it is tried on."""
PATIENCE_S = 3 * 3600.0
"""With others on a full disk: one that waits for another machine's part may wait for ever."""


class ResultsNotWritten(Fault):
    """Their disk did not take them."""


def write_with_retries(
    action: Callable[[], str],
    *,
    agree: Callable[[bool], bool],
    waiting: Callable[[], bool],
    leave: Callable[[], None],
    tell: Callable[[str, str], None],
    folder: Path,
    wanted: Callable[[], int],
) -> None:
    """Repeats an action of all processes until it has failed for none; it returns why it failed, or nothing.

    `agree`: true for all where it is for one. `waiting`: whether other checkpoints lie on this disk, which counts only
    where that is the disk that fails. `leave`: called before another try, by all, and may raise. `folder`: where they
    are written. `wanted`: how many bytes. Raises Unwritten for all.
    """
    tries, began = 0, time.monotonic()
    while True:
        why = action()
        if not agree(bool(why)):
            return
        if why:
            tell("save_failed", f"the results could not be written: {why}")
        if not agree(bool(why) and waiting() and time.monotonic() - began < PATIENCE_S):
            tries += 1
        if tries > len(PAUSES_S):
            last = why or "by another process"
            raise ResultsNotWritten(
                f"the results could not be written, last: {last}; {room.disk_full_message(folder, wanted())}"
            )
        time.sleep(PAUSES_S[max(0, tries - 1)])
        leave()


def try_write(action: Callable[[], None]) -> str:
    """Why an action failed for its disk; empty: it did not."""
    try:
        action()
    except (OSError, SafetensorError) as e:
        return f"{type(e).__name__}: {e}"
    return ""
