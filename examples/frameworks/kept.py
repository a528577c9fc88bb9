"""Checkpoint handling that all programs of this folder share.

The contents of $GPUBROKER_CHECKPOINT_DIR are committed at every interval, on a drain and at the end, and are restored
before the next start. So the folder must never hold half-written files: the programs write files elsewhere and
then rename them into the folder.
"""

import os
import shutil
import signal
from pathlib import Path

KEPT = Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
ASIDE = Path("aside")
"""Folder for unfinished files, on the same disk so that a move into `KEPT` is one rename. The agent ignores it."""


class Stop:
    """True once the program was asked to stop (SIGTERM): it then saves and ends with exit code 0."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked


def publish(source: Path, name: str) -> None:
    """Move a finished file or folder into the kept folder.

    A file of that name is replaced by one rename; folders get a new name each time.
    """
    source.replace(KEPT / name)


def retire(pattern: str, keep: int = 2) -> None:
    """Remove all but the newest `keep` folders that match `pattern`."""
    for folder in numbered(pattern)[:-keep]:
        removed = ASIDE / f"removed-{folder.name}"
        folder.replace(removed)  # the agent never sees a half-removed folder
        shutil.rmtree(removed)


def numbered(pattern: str) -> list[Path]:
    """Return folders such as checkpoint-20, sorted by their number."""
    return sorted(KEPT.glob(pattern), key=lambda folder: int(folder.name.rpartition("-")[2]))
