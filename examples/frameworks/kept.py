"""Checkpoint handling that all programs of this folder share.

The contents of $GPUBROKER_CHECKPOINT_DIR are committed at every interval, on a drain and at the end, and are restored
before the next start. So the folder must never hold half-written files: they are written elsewhere, and moved to their
final name at once.
"""

import os
import shutil
import signal
from pathlib import Path

KEPT = Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
ASIDE = Path("aside")
"""Folder next to the program, on the same disk: a move there and back is one rename, and it is not committed."""


class Stop:
    """True once the machine is to be given back: save, and end with exit code 0."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked


def publish(made: Path, name: str) -> None:
    """Moves a finished file or folder into the kept folder.

    A file of that name is replaced by one rename; folders get a new name each time.
    """
    made.replace(KEPT / name)


def retire(pattern: str, keep: int = 2) -> None:
    """Removes all but the newest folders of a pattern, after their successor is there."""
    for old in numbered(pattern)[:-keep]:
        gone = ASIDE / f"gone-{old.name}"
        old.replace(gone)  # A reader finds it whole or not at all.
        shutil.rmtree(gone)


def numbered(pattern: str) -> list[Path]:
    """Folders such as checkpoint-20, by their number."""
    return sorted(KEPT.glob(pattern), key=lambda folder: int(folder.name.rpartition("-")[2]))
