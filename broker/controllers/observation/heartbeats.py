"""Heartbeats as this process observes them: a heartbeat is fresh when its e_tag changes, by the monotonic clock."""

import contextlib
import math
from collections.abc import Set

from pydantic import ValidationError

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import BlobsUnavailable, BlobTooLarge
from broker.domain.ids import AttemptId
from broker.domain.spec import MAX_NODES
from broker.lifecycle.liveness import progress_of
from broker.lifecycle.observation.attempt_facts import HeartbeatRecord
from trainer.contract import object_keys
from trainer.contract.documents import Final, Heartbeat, Outcome

MAX_BEAT = 64 * 1024
"""Maximum bytes of a heartbeat. A larger object, which a host may write, is not read into memory."""
LISTED_AT_ONCE = 2000
"""Number of heartbeats beyond which the store is listed less often, because a LIST returns all of them."""
MAX_FINAL = 256 * 1024
"""Maximum bytes of a final report."""


class HeartbeatReader:
    """Reads all heartbeats: one LIST shows them all, and an object is read only when its e_tag has changed."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._watched: dict[tuple[AttemptId, int], HeartbeatRecord] = {}
        """Records by attempt and node, from 0. Node 0 reports the progress."""
        self._listed = float("-inf")
        self._readable, self._readable_since = False, 0.0

    @property
    def listed_at(self) -> float:
        """Monotonic time of the latest LIST. Later heartbeats are unknown, for example if this process was frozen."""
        return self._listed

    @property
    def readable_s(self) -> float | None:
        """Seconds for which heartbeats have been readable without a gap over `lost_s`; None: the latest LIST failed."""
        return self._context.clock.monotonic() - self._readable_since if self._readable else None

    async def refresh(self) -> None:
        """List all heartbeats, unless they were listed a moment ago. Raises BlobsUnavailable.

        Time in which heartbeats could not be read does not count as silence.
        """
        now = self._context.clock.monotonic()
        if now - self._listed < self._context.intervals.look_s / 2 * max(1.0, len(self._watched) / LISTED_AT_ONCE):
            return
        try:
            listed = await self._context.blobs.list(object_keys.HEARTBEATS, max_per_folder=MAX_NODES)
        except BlobsUnavailable:
            self._readable = False
            raise
        is_long = now - self._listed > self._context.timeouts.lost_s
        if is_long:
            self._readable_since = now  # the store may have been unreachable since the previous LIST
        if is_long or not self._readable:
            for watch in self._watched.values():
                watch.changed += now - self._listed
                watch.progressed += now - self._listed
        self._listed, self._readable = now, True
        for blob in listed:
            node = object_keys.node_of_heartbeat(blob.key)
            if blob.bytes > MAX_BEAT or node is None or node >= MAX_NODES:
                continue
            key = AttemptId(object_keys.attempt_of_heartbeat(blob.key)), node
            watched = self._watched.get(key)
            if watched is None:
                self._watched[key] = HeartbeatRecord(etag=blob.etag, changed=now, progressed=now)
            elif watched.etag != blob.etag:
                watched.etag, watched.changed, watched.beat = blob.etag, now, None

    async def refresh_if_overdue(self) -> None:
        """List the heartbeats although no row is due. Rows of a cloud that is cut off are rarely due."""
        is_overdue = self._context.clock.monotonic() - self._listed > self._context.timeouts.lost_s / 2
        if self._watched and is_overdue:
            with contextlib.suppress(BlobsUnavailable):
                await self.refresh()

    def shown(self, attempt: AttemptId, nodes: int) -> bool:
        """Return True if the latest `refresh` listed a heartbeat of every node, of any age."""
        return all((attempt, node) in self._watched for node in range(nodes))

    def peers_silent_s(self, attempt: AttemptId, nodes: int) -> float | None:
        """Return the longest silence, in seconds, of the nodes other than 0 that are not done.

        Infinity: a node has sent no heartbeat yet. None: there is no such node.
        """
        peers = [self._watched.get((attempt, node)) for node in range(1, nodes)]
        ages = (self._listed - peer.changed if peer else math.inf for peer in peers if peer is None or not peer.done)
        return max(ages, default=None)

    async def finished(self, attempt: AttemptId, nodes: int) -> int:
        """Return how many nodes other than 0 report that they are done. Raises BlobsUnavailable.

        Each of them may shut itself down while node 0 still delivers.
        """
        peers = [await self.latest(attempt, node) for node in range(1, nodes)]
        return sum(peer is not None and peer.done for peer in peers)

    async def latest(self, attempt: AttemptId, node: int = 0) -> HeartbeatRecord | None:
        """Return the record of a node with its heartbeat read; None: there is none. Raises BlobsUnavailable."""
        watch = self._watched.get((attempt, node))
        if watch is None or watch.beat is not None:
            return watch
        try:
            data = await self._context.blobs.get(object_keys.heartbeat(attempt, node), max_bytes=MAX_BEAT)
            if data is None:
                return None
            watch.beat = Heartbeat.model_validate_json(data)
        except (ValidationError, BlobTooLarge):
            return watch  # an invalid heartbeat, which a host may write, proves life but no progress
        if (progress := progress_of(watch.beat)) != watch.progress:
            watch.progress, watch.progressed = progress, self._context.clock.monotonic()
        return watch

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget attempts that are not live."""
        self._watched = {key: watch for key, watch in self._watched.items() if key[0] in live}


async def read_final(context: ControllerContext, attempt: AttemptId) -> Final | None:
    """Return the attempt's final report; None: there is none, or it is invalid. Raises BlobsUnavailable.

    A report that is too large is a fault of the host. The returned report says so, and the job moves to another host.
    """
    try:
        data = await context.blobs.get(object_keys.final(attempt), max_bytes=MAX_FINAL)
    except BlobTooLarge as e:
        message = f"the machine wrote a report that is not the trainer's: {e}; another machine is tried"
        return Final(attempt=attempt, outcome=Outcome.INFRASTRUCTURE, message=message, bad_host=True)
    if data is None:
        return None
    try:
        return Final.model_validate_json(data)
    except ValidationError:
        return None
