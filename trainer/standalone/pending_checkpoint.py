"""A checkpoint that a run on this machine alone could not bring into its store: it stays, and goes there first when the
run goes on.
"""

import contextlib
import shutil
from pathlib import Path

from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.core import disk_space as room
from trainer.core.ipc import RunFolder, SnapshotInfo, info_of
from trainer.objectstore.objects import Objects


def pending_snapshot(run: RunFolder) -> Path | None:
    """The newest one."""
    with contextlib.suppress(OSError):  # nothing has run there
        return max(run.waiting(), default=None)
    return None


def named(snapshot: Path) -> str:
    """For people."""
    return f"the checkpoint of step {_info(snapshot).step}, which stays in {snapshot},"


def _info(snapshot: Path) -> SnapshotInfo:
    return SnapshotInfo.model_validate_json(info_of(snapshot).read_bytes())


async def commit_pending(objects: Objects, origin: Origin, snapshot: Path) -> None:
    """Commits it, unless its run did so and was cut off right after. Raises StoreError, OSError; then it stays."""
    info = _info(snapshot)
    there = [key for key in await checkpoint.own(objects, origin) if keys.step_of(key) >= info.step]
    # What a training that ended right after a save has of that step in the store are no results.
    if not there or (info.complete and not any([await checkpoint.verified(objects, key) for key in there])):
        await checkpoint.commit(objects, origin, snapshot, step=info.step, complete=info.complete, taken_s=info.taken_s)
    shutil.rmtree(snapshot)


def clean_up(work: Path, run: RunFolder, store: Path) -> str:
    """Removes what a run had there, but no checkpoint that its store lacks: the line about that, if there is one."""
    snapshot = pending_snapshot(run)
    if snapshot is None:
        shutil.rmtree(work, ignore_errors=True)
        return ""
    for path in work.iterdir():
        if path != run.root:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    why = room.disk_full_message(store, room.of_tree(snapshot))
    return f"{named(snapshot)} could not be brought into the store: {why}; start again then, it goes on from there"
