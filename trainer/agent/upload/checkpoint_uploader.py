"""Upload of snapshots as committed checkpoints; a store outage only delays them."""

import asyncio
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.agent.base.state import AgentState
from trainer.agent.upload.save_cost import SaveCost, Sending, size_of
from trainer.checkpoint import protocol
from trainer.checkpoint.protocol import Origin
from trainer.contract.documents import CheckpointRef, Manifest
from trainer.contract.guard import GuardConfig
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import SnapshotInfo, info_of
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError

POLL_S = 0.2
RETRY_S = 5.0
SETTLE_S = 0.05
PARTS_S = 30.0
"""Seconds to wait for other machines' parts after a failure."""


class Saver:
    """Uploader of the newest complete snapshot; older waiting snapshots are removed."""

    def __init__(
        self,
        objects: Objects,
        state: AgentState,
        origin: Origin,
        *,
        config: CheckpointConfig,
        guard: GuardConfig | None,
        log: Callable[[str], None],
        committed: Callable[[float], None],
    ) -> None:
        """Create the uploader. `committed`: called after each commit with its seconds of work."""
        self._objects, self._state, self._origin, self._config = objects, state, origin, config
        self._guard = guard
        self._log, self._committed = log, committed
        self._busy = asyncio.Lock()
        self._parts_until = math.inf
        self._effort = SaveCost()
        self._sending: Sending | None = None

    async def run(self) -> None:
        """Upload new snapshots until cancelled."""
        while True:
            try:
                await self.once()
            except (ObjectStoreError, OSError) as e:
                self._log(f"a checkpoint waits on disk: {e}")
                self._state.add_message(
                    "upload_waits", f"a checkpoint waits on disk, and the one before it counts: {e}"
                )
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(POLL_S)

    async def flush(self, *, failed: bool = False) -> bool:
        """Upload what waits; return False if time ran out or the store was unreachable for too long.

        `failed`: other machines may have ended, with parts of the snapshot.
        """
        started = time.monotonic()
        if failed:
            self._parts_until = started + PARTS_S
        while left := self._patience(started):
            try:
                async with self._state.in_time(left):
                    await self.once()
                return True
            except (ObjectStoreError, OSError) as e:  # includes TimeoutError
                self._log(f"the last checkpoint waits on disk: {e or 'out of time'}")
            await asyncio.sleep(min(1.0, max(0.0, self._patience(started))))
        return not self._state.run.waiting()

    @property
    def save_s(self) -> float | None:
        """Expected seconds of another save; None: unknown."""
        return self._effort.save_s(self._own())

    @property
    def finish_s(self) -> float | None:
        """Seconds until the complete snapshot on this disk is sent; None: there is none, or unknown."""
        if (sending := self._own()) is not None:
            return self._effort.upload_s(sending.bytes - sending.sent, sending)
        waiting = [] if self._sending else self._state.run.waiting()
        return self._effort.upload_s(size_of(waiting[-1]), None) if waiting else None

    def _own(self) -> Sending | None:
        """Return the upload under way, unless other machines have parts of it."""
        return self._sending if self._sending is not None and self._sending.whole else None

    async def settle(self) -> None:
        """Wait for the upload under way.

        The wait ends early if a later snapshot can replace it, the attempt must end, or the store stays away.
        """
        started = time.monotonic()
        while (sending := self._own()) is not None and self._patience(started) > 0:
            newest = max(self._state.run.waiting(), default=sending.folder)
            if newest != sending.folder:
                takes_s = self._effort.upload_s(size_of(newest), sending)
                if takes_s is None or takes_s <= self._state.drain_left_s:
                    return
            await asyncio.sleep(SETTLE_S)

    def _patience(self, started: float) -> float:
        silent_s = time.monotonic() - max(started, self._objects.answered_at)
        return max(0.0, min(self._state.drain_left_s, self._state.limits.outage_s - silent_s))

    async def once(self) -> None:
        """Commit the newest snapshot, if any. Raises: ObjectStoreError; the snapshot then stays.

        A snapshot is removed without a commit if the store has unusable content under its key.
        """
        async with self._busy:
            waiting = self._state.run.waiting()
            for older in waiting[:-1]:
                await _remove(older)
            if waiting:
                await self._commit(waiting[-1])

    async def _commit(self, folder: Path) -> None:
        info = SnapshotInfo.model_validate_json(info_of(folder).read_bytes())
        sending = self._sending = Sending(folder=folder, bytes=size_of(folder), whole=info.part is None)
        try:
            committed = await self._upload(folder, info, sending.more)
        except BadContent as e:
            committed = None
            self._log(f"the checkpoint of step {info.step} is left: {e}")
            message = f"a checkpoint could not be committed, and the one before it counts: {e}"
            self._state.add_message("save_failed", message)
        finally:
            self._sending = None
        if committed is None:
            return await _remove(folder)
        key, manifest = committed
        total = sum(f.bytes for f in manifest.files)
        self._state.checkpoint = CheckpointRef(
            manifest=key, step=info.step, save_s=manifest.save_s, stall_s=round(info.stall_s, 4), bytes=total
        )
        if info.complete:
            self._state.complete = key
        await _remove(folder)
        self._log(
            f"checkpoint of step {info.step} committed: {total / 1e6:.1f} MB "
            f"in {manifest.save_s:.2f} s; training paused for {info.stall_s * 1e3:.0f} ms"
        )
        self._effort.saved(manifest.save_s, sending)
        self._committed(manifest.save_s)
        try:
            await protocol.prune(self._objects, self._origin, self._config, self._guard)
        except ObjectStoreError as e:
            self._log(f"old checkpoints stay for now: {e}")

    async def _upload(
        self, folder: Path, info: SnapshotInfo, sent: Callable[[int], None]
    ) -> tuple[str, Manifest] | None:
        """Commit the snapshot on this disk with the other machines' parts; None if another machine must do it."""
        objects, origin, part = self._objects, self._origin, info.part
        fields: Any = {"step": info.step, "complete": info.complete, "taken_s": info.taken_s, "sent": sent}
        if part is None:
            return await protocol.commit(objects, origin, folder, **fields)
        if part.node > 0:
            count = await protocol.offer(
                objects, origin, folder, step=info.step, complete=info.complete, part=part, sent=sent
            )
            self._log(f"part {part.node + 1} of {part.nodes} of step {info.step}'s checkpoint: {count / 1e6:.1f} MB")
            return None
        committed = await protocol.commit_parts(
            objects, origin, folder, **fields, part=part, should_give_up=self._should_give_up
        )
        if committed is None:
            self._log(f"the checkpoint of step {info.step} is left: another machine did not send its part")
        return committed

    def _should_give_up(self) -> bool:
        """Return True if waiting for other machines' parts is useless: a later snapshot exists, or they have ended."""
        return len(self._state.run.waiting()) > 1 or time.monotonic() > self._parts_until


async def _remove(folder: Path) -> None:
    """Remove the folder atomically for readers, by renaming it first.

    A removal continues in its thread after its caller is cancelled, and a partial snapshot must not look complete.
    """
    doomed = folder.with_name(f".{folder.name}.gone")
    folder.rename(doomed)
    info_of(folder).unlink(missing_ok=True)
    await asyncio.to_thread(shutil.rmtree, doomed)
