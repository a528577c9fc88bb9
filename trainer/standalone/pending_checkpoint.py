"""Checkpoint that a standalone run could not commit to its store; it is committed first when the run resumes."""

import contextlib
import shutil
from pathlib import Path

from trainer.checkpoint import protocol
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys
from trainer.core import disk_space
from trainer.core.ipc import RunFolder, SnapshotInfo, info_of
from trainer.objectstore.objects import Objects


def pending_snapshot(run: RunFolder) -> Path | None:
    """Return the newest pending snapshot, or None."""
    with contextlib.suppress(OSError):  # the folder is absent if no run used it
        return max(run.waiting(), default=None)
    return None


def named(snapshot: Path) -> str:
    """Return the snapshot's name for messages."""
    return f"the checkpoint of step {_info(snapshot).step}, which stays in {snapshot},"


def _info(snapshot: Path) -> SnapshotInfo:
    return SnapshotInfo.model_validate_json(info_of(snapshot).read_bytes())


async def commit_pending(objects: Objects, origin: Origin, snapshot: Path) -> None:
    """Commit the snapshot unless its run did so just before it was interrupted.

    Raises: ObjectStoreError, OSError; the snapshot then stays.
    """
    info = _info(snapshot)
    later_manifests = [
        key for key in await protocol.own_manifests(objects, origin) if object_keys.step_of(key) >= info.step
    ]
    # If the last save was just before the end, the store has a checkpoint of this step, but no results.
    if not later_manifests or (
        info.complete and not any([await protocol.verified(objects, key) for key in later_manifests])
    ):
        await protocol.commit(objects, origin, snapshot, step=info.step, complete=info.complete, taken_s=info.taken_s)
    shutil.rmtree(snapshot)


def clean_up(work: Path, run: RunFolder, store: Path) -> str:
    """Remove a run's working files, except a checkpoint that its store lacks.

    Return a message about that checkpoint, or an empty text.
    """
    snapshot = pending_snapshot(run)
    if snapshot is None:
        shutil.rmtree(work, ignore_errors=True)
        return ""
    for path in work.iterdir():
        if path != run.root:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    why = disk_space.disk_full_message(store, disk_space.tree_bytes(snapshot))
    return f"{named(snapshot)} could not be stored: {why}; start again then, and the run resumes from there"
