"""Outbox: delivers the notifications of every channel, at least once, in order for each job.

Steps: drop deliveries that are too old, claim the due streams, and start a `ChannelRound` for each of their channels.
Write the result of each round in one step. A slow or broken channel delays no other channel.
Facts: due deliveries, the answers of receivers, the number of consecutive failures of a channel.
Decisions: see `broker.reporting.delivery_round`; repeat, give up, pause, or disable the channel.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from broker.controllers.base.context import ControllerContext
from broker.controllers.notifications.channel_round import ChannelRound
from broker.ports import Notifier, Stream

log = logging.getLogger(__name__)

LEASE_S = 60.0
STREAMS = 64
"""Maximum number of streams of one channel and round."""
DEPTH = 32
"""Maximum number of deliveries of one stream and round."""
TRIM_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OutboxRetention:
    """Limits of the deliveries that wait for a channel."""

    age_s: float = 7 * 86_400.0
    """Seconds after which a delivery is given up."""
    rows: int = 100_000
    """Maximum number of deliveries of one channel."""


class Outbox:
    """Delivers to all channels. `jitter()` returns a number in [0, 1)."""

    name = "outbox"

    def __init__(
        self,
        context: ControllerContext,
        notifiers: Sequence[Notifier],
        *,
        jitter: Callable[[], float],
        keep: OutboxRetention | None = None,
    ) -> None:
        self._context = context
        self._notifiers: Mapping[str, Notifier] = {notifier.kind: notifier for notifier in notifiers}
        self._jitter = jitter
        self._keep = keep or OutboxRetention()
        self._rounds: dict[str, asyncio.Task[None]] = {}
        self._trimmed_at: float | None = None
        self.every_s = context.intervals.poll_s

    async def step(self) -> bool:
        """Start a round for every channel that has due deliveries and no round. Raises the error of a round.

        Returns when a round ends, at the latest after `every_s`.
        """
        await self._trim()
        if not self._notifiers:
            return False
        streams = await self._context.store.claim_streams(
            list(self._notifiers), busy=list(self._rounds), owner=self._context.owner, lease_s=LEASE_S, limit=STREAMS,
            depth=DEPTH,
        )  # fmt: skip
        by_channel: dict[str, list[Stream]] = {}
        for stream in streams:
            by_channel.setdefault(stream.channel.id, []).append(stream)
        for channel, channel_streams in by_channel.items():
            self._rounds[channel] = asyncio.create_task(
                self._round(channel_streams), name=f"outbox {channel_streams[0].channel.name}"
            )
        return await self._round_ended()

    async def _round_ended(self) -> bool:
        """Wait until a round ends, for at most `every_s`. Return True if a round has ended."""
        if not self._rounds:
            return False
        poll = asyncio.ensure_future(self._context.clock.sleep(self.every_s))
        try:
            await asyncio.wait({*self._rounds.values(), poll}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poll.cancel()
        ended = [channel for channel, task in self._rounds.items() if task.done()]
        for task in [self._rounds.pop(channel) for channel in ended]:
            task.result()
        return bool(ended)

    async def close(self) -> None:
        """Cancel all rounds. The next claim repeats their deliveries."""
        for task in self._rounds.values():
            task.cancel()
        await asyncio.gather(*self._rounds.values(), return_exceptions=True)

    async def _trim(self) -> None:
        now = self._context.clock.monotonic()
        if self._trimmed_at is None or now - self._trimmed_at >= TRIM_S:
            self._trimmed_at = now
            dropped = await self._context.store.trim_outbox(age_s=self._keep.age_s, rows=self._keep.rows)
            if dropped:
                log.warning(
                    "%d deliveries were never taken and are given up; gpubroker channel ls counts them", dropped
                )

    async def _round(self, streams: Sequence[Stream]) -> None:
        context, notifier = self._context, self._notifiers[streams[0].channel.kind]
        channel_round = ChannelRound(notifier, streams, clock=context.clock, jitter=self._jitter)
        await context.store.settle(await channel_round.run())
