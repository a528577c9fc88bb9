"""Heartbeats as this process sees them: freshness is a change of the e_tag on its own monotonic clock."""

import contextlib
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId
from broker.domain.spec import MAX_NODES
from broker.lifecycle.liveness import progress_of
from trainer.contract import object_keys as keys
from trainer.contract.documents import Beat, Final

MAX_BEAT = 64 * 1024
"""Bytes; what a host writes beyond that is no beat, and is never read into memory."""


@dataclass
class HeartbeatRecord:
    """What is remembered of one machine's beats."""

    etag: str
    changed: float
    beat: Beat | None = None
    progress: tuple[Any, ...] = ()
    progressed: float = 0.0

    @property
    def done(self) -> bool:
        """It has said so, as far as its beat was read."""
        return self.beat is not None and self.beat.phase == "done"


class HeartbeatReader:
    """One LIST shows the life of all; an object is read only when its e_tag changed."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._watched: dict[tuple[AttemptId, int], HeartbeatRecord] = {}
        """By the machine of the attempt, from 0: the first tells how it gets on."""
        self._listed = float("-inf")
        self._readable, self._readable_since = False, 0.0

    @property
    def heard_at(self) -> float:
        """Up to when silence is known, monotonic: nobody has listened since, as where this process stood still."""
        return self._listed

    @property
    def readable_s(self) -> float | None:
        """For how long beats could be written and seen, but for moments in which nobody could miss one; None: they
        cannot be seen now.
        """
        return self._context.clock.monotonic() - self._readable_since if self._readable else None

    async def refresh(self) -> None:
        """Lists all beats unless done a moment ago. A time in which nobody could see any ages none of them."""
        now = self._context.clock.monotonic()
        if now - self._listed < self._context.rhythm.look_s / 2:
            return
        try:
            listed = await self._context.blobs.list(keys.BEATS)
        except BlobsUnavailable:
            self._readable = False
            raise
        long = now - self._listed > self._context.patience.lost_s
        if long:
            self._readable_since = now  # it may have been away, also where nobody looked
        if long or not self._readable:
            for watch in self._watched.values():
                watch.changed += now - self._listed
                watch.progressed += now - self._listed
        self._listed, self._readable = now, True
        for blob in listed:
            node = keys.node_of_beat(blob.key)
            if blob.bytes > MAX_BEAT or node is None or node >= MAX_NODES:
                continue
            own = AttemptId(keys.attempt_of_beat(blob.key)), node
            known = self._watched.get(own)
            if known is None:
                self._watched[own] = HeartbeatRecord(etag=blob.etag, changed=now, progressed=now)
            elif known.etag != blob.etag:
                known.etag, known.changed, known.beat = blob.etag, now, None

    async def go_on(self) -> None:
        """Where no row is due, as those of a cloud that is cut off are seldom: else their silence would not be seen."""
        seldom = self._context.clock.monotonic() - self._listed > self._context.patience.lost_s / 2
        if self._watched and seldom:
            with contextlib.suppress(BlobsUnavailable):
                await self.refresh()

    def shown(self, attempt: AttemptId, nodes: int) -> bool:
        """True when the last `refresh` found a beat of all of its machines, however old."""
        return all((attempt, node) in self._watched for node in range(nodes))

    def peers_silent_s(self, attempt: AttemptId, nodes: int) -> float | None:
        """Since a beat was seen of the machine beside the first that has been silent for longest, and is not known to
        be done; infinite: of one there was none yet; None: there is no such machine.
        """
        mates = [self._watched.get((attempt, node)) for node in range(1, nodes)]
        ages = (self._listed - one.changed if one else math.inf for one in mates if one is None or not one.done)
        return max(ages, default=None)

    async def finished(self, attempt: AttemptId, nodes: int) -> int:
        """How many machines beside the first have said that they are done: each may end itself while that one goes on
        to deliver. Raises BlobsUnavailable.
        """
        mates = [await self.latest(attempt, node) for node in range(1, nodes)]
        return sum(one is not None and one.done for one in mates)

    async def latest(self, attempt: AttemptId, node: int = 0) -> HeartbeatRecord | None:
        """The watch with its beat read; None while there is no beat. Raises BlobsUnavailable."""
        watch = self._watched.get((attempt, node))
        if watch is None or watch.beat is not None:
            return watch
        data = await self._context.blobs.get(keys.beat(attempt, node))
        if data is None:
            return None
        try:
            watch.beat = Beat.model_validate_json(data)
        except ValidationError:
            return watch  # a host may write nonsense under its own key; it is a sign of life and nothing more
        if (progress := progress_of(watch.beat)) != watch.progress:
            watch.progress, watch.progressed = progress, self._context.clock.monotonic()
        return watch

    def keep(self, live: Set[AttemptId]) -> None:
        self._watched = {own: watch for own, watch in self._watched.items() if own[0] in live}


async def read_final(context: ControllerContext, attempt: AttemptId) -> Final | None:
    """The attempt's last word; None while there is none, or when it cannot be understood."""
    data = await context.blobs.get(keys.final(attempt))
    if data is None:
        return None
    try:
        return Final.model_validate_json(data)
    except ValidationError:
        return None
