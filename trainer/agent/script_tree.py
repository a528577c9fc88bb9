"""Snapshots of the folder that a script writes its checkpoints to.

Taken when the tree holds still. A tree that never does is taken file by file, each whole in itself: a program that
writes all the time should write a file aside and rename it.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from trainer.ipc import INFO, RunFolder, SnapshotInfo

QUIET_S = 1.0
PATIENCE = 5
"""Looks at a moving tree before it is taken file by file."""
TRIES = 20
"""Copies of one file that changes while it is copied."""

Listing = dict[str, tuple[int, int]]


def listing(tree: Path) -> Listing:
    """Size and time of change of every file; a file that vanishes meanwhile is left out."""
    found: Listing = {}
    for path in tree.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                stat = path.stat()
                found[path.relative_to(tree).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return found


class ScriptTree:
    """Watches one folder; every snapshot gets the next number as its step."""

    def __init__(
        self, tree: Path, run: RunFolder, *, every_s: Callable[[], float], step: int, say: Callable[[str], None]
    ) -> None:
        self._tree, self._run, self._every_s, self.step = tree, run, every_s, step
        self._say = say
        self._saved: Listing = listing(tree)

    async def run(self) -> None:
        """Takes a snapshot at every interval, as soon as two looks agree or patience ends, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s())
            seen, looks = listing(self._tree), 0
            while True:
                await asyncio.sleep(QUIET_S)
                now, looks = listing(self._tree), looks + 1
                moving = now != seen
                seen = now
                if (not moving or looks >= PATIENCE) and await self.snapshot(complete=False, moving=moving):
                    break

    async def snapshot(self, *, complete: bool, moving: bool = False) -> bool:
        """Copies the tree if it changed since the last time; False when it moved while it was copied.

        With `moving` only each file must hold still while it is copied.
        """
        return await asyncio.to_thread(self._snapshot, complete, moving)

    def _snapshot(self, complete: bool, moving: bool) -> bool:
        started = time.monotonic()
        before = listing(self._tree)
        if not before or (before == self._saved and not complete):
            return True
        name = f"{self.step + 1:010d}"
        temporary = self._run.snapshots / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            for file in before:
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                if not _copy_whole(self._tree / file, temporary / file):
                    return False
        except FileNotFoundError:
            return False
        if not moving and listing(self._tree) != before:
            return False
        self.step += 1
        info = SnapshotInfo(step=self.step, complete=complete, started=started, stall_s=0.0)
        (temporary / INFO).write_text(info.model_dump_json())
        temporary.rename(self._run.snapshots / name)
        self._saved = before
        return True


def _copy_whole(source: Path, target: Path) -> bool:
    """Copies a file as it stood at one moment: the same inode, size and time of change before and after."""
    for _ in range(TRIES):
        before = source.stat()
        shutil.copyfile(source, target)
        after = source.stat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns):
            return True
    return False
