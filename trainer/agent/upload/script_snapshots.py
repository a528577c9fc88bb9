"""Snapshots of the folder with a script's checkpoints.

A snapshot is taken when the tree does not change. If the tree changes all the time, only each single file is consistent
in the snapshot. A program that writes constantly should write a temporary file and rename it.
"""

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.core.ipc import RunFolder, SnapshotInfo, info_of

QUIET_S = 1.0
MAX_CHECKS = 5
"""Checks of a changing tree before it is copied file by file."""
TRIES = 20
"""Attempts to copy a file that changes during the copy."""
RETRY_S = 30.0
"""Seconds until a snapshot that could not be written is tried again."""

Listing = dict[str, tuple[int, int]]


def listing(tree: Path) -> Listing:
    """Return size and modification time of every file; files and folders that vanish meanwhile are left out."""
    files: Listing = {}
    for folder, _, names in os.walk(tree):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    files[path.relative_to(tree).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return files


class ScriptTree:
    """Watcher of one folder; each snapshot gets the next number as its step."""

    def __init__(
        self, tree: Path, run: RunFolder, *, every_s: Callable[[], float], step: int, report: Callable[[str, str], None]
    ) -> None:
        self._tree, self._run, self._every_s, self.step = tree, run, every_s, step
        self._report = report
        self._lock = threading.Lock()  # a snapshot continues in its thread after its caller is cancelled
        self._saved: Listing = listing(tree)

    async def run(self) -> None:
        """Take a snapshot after every interval, until cancelled.

        A snapshot waits until two listings agree, for at most MAX_CHECKS checks.
        """
        pause_s = self._every_s()
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._every_s() if await self._take_when_quiet() else min(RETRY_S, self._every_s())

    async def _take_when_quiet(self) -> bool:
        """Take a snapshot; return False if it could not be written."""
        before, checks = listing(self._tree), 0
        while True:
            await asyncio.sleep(QUIET_S)
            now, checks = listing(self._tree), checks + 1
            moving = now != before
            before = now
            if not moving or checks >= MAX_CHECKS:
                try:
                    if await self.snapshot(complete=False, moving=moving):
                        return True
                except OSError as e:
                    self._report_failure(e)
                    return False

    async def last(self, *, complete: bool) -> bool:
        """Take a snapshot of the program's final state; return False if it could not be written."""
        try:
            return await self.snapshot(complete=complete)
        except OSError as e:
            self._report_failure(e)
            return False

    def _report_failure(self, error: OSError) -> None:
        """Report a failed snapshot, usually due to a full disk."""
        self._report("save_failed", f"a checkpoint could not be written, and the one before it counts: {error}")

    async def snapshot(self, *, complete: bool, moving: bool = False) -> bool:
        """Copy the tree if it changed since the last time; return False if it changed during the copy.

        With `moving` only each file must stay unchanged during its copy.

        Raises: OSError, and removes the partial copy.
        """
        return await asyncio.to_thread(self._snapshot, complete, moving)

    def _snapshot(self, complete: bool, moving: bool) -> bool:
        temporary = self._run.snapshots / ".being-taken"
        with self._lock:
            try:
                return self._take(temporary, complete, moving)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _take(self, temporary: Path, complete: bool, moving: bool) -> bool:
        started = time.monotonic()
        before = listing(self._tree)
        if not before or (before == self._saved and not complete):
            return True
        target = self._run.snapshots / f"{self.step + 1:010d}"
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
        taken_s = round(time.monotonic() - started, 3)
        info = SnapshotInfo(step=self.step, complete=complete, taken_s=taken_s, stall_s=0.0)
        info_of(target).write_text(info.model_dump_json())
        temporary.rename(target)
        self._saved = before
        return True


def _copy_whole(source: Path, target: Path) -> bool:
    """Copy a file consistently: same inode, size and modification time before and after."""
    for _ in range(TRIES):
        before = source.stat()
        shutil.copyfile(source, target)
        after = source.stat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns):
            return True
    return False
