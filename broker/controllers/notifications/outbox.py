"""Tells people and programs: every channel its deliveries, at least once, in order for each job.

A channel's streams are told side by side, channels too; a slow or broken one holds up no other. What a round of a
channel came to is written in one step.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import ChannelRefused, NotifyError, RetryAfter, Undeliverable
from broker.domain.job import RESTING_JOB_STATES
from broker.domain.notifications import Channel, Delivery, Notice
from broker.ports import DeliveryResult, Notifier, Settlement, State, Stream
from broker.reporting.delivery import FOLDED, NOT_TAKEN, back_off_s, channel_after, fold, hopeless

log = logging.getLogger(__name__)

LEASE_S = 60.0
ROUND_S = 25.0
"""No delivery of a round begins after this, so that its lease outlasts it."""
DELIVERY_S = 25.0
"""One delivery takes no longer."""
STREAMS = 64
"""Of one channel and round."""
DEPTH = 32
"""Deliveries of one stream and round."""
AT_ONCE = 16
"""Deliveries of one channel under way."""
TRIM_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OutboxRetention:
    """How long the outbox waits for a channel that takes nothing."""

    age_s: float = 7 * 86_400.0
    rows: int = 100_000
    """A channel."""


@dataclass
class _ChannelRound:
    """One channel's: what it came to so far."""

    channel: Channel
    begun: float
    told: bool = False
    failed: str = ""
    paused: str = ""
    pause_s: float = 0.0
    refused: str = ""
    streams: list["_StreamProgress"] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Nothing more is sent: the channel asked for a pause, or wants nothing any more."""
        return bool(self.paused or self.refused)


@dataclass
class _StreamProgress:
    """One stream's: what it came to so far."""

    stream: Stream
    state: State | None
    done: list[int] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    failing: tuple[int, ...] = ()
    """Rows of the delivery that failed."""
    attempts: int = 0


class Outbox:
    """`jitter()`: a number in [0, 1)."""

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
        self.every_s = context.rhythm.poll_s

    async def step(self) -> bool:
        """Starts a round for every channel with something due that has none; ends when one has ended, or after a poll.

        Raises what a round raised.
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
        for channel, mine in by_channel.items():
            self._rounds[channel] = asyncio.create_task(self._round(mine), name=f"outbox {mine[0].channel.name}")
        return await self._ended()

    async def _ended(self) -> bool:
        """Waits for the first round to end, a poll at most; True when one did."""
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
        """What is under way is cut off; whoever claims it next tells it again."""
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

    # -------------------------------------------------------------------------------------------------------- a round

    async def _round(self, streams: Sequence[Stream]) -> None:
        round_ = _ChannelRound(channel=streams[0].channel, begun=self._context.clock.monotonic())
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(stream: Stream) -> None:
            async with gate:
                await self._stream(round_, stream)

        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(one(stream))
        await self._context.store.settle(self._settlement(round_))

    async def _stream(self, round_: _ChannelRound, stream: Stream) -> None:
        left = _StreamProgress(stream=stream, state=stream.state)
        round_.streams.append(left)
        waiting = [(pending.row, pending.delivery) for pending in stream.pending]
        told = fold([delivery for _, delivery in waiting]) or [(Delivery(stream=stream.name), ())]
        for delivery, indices in told:
            late = self._context.clock.monotonic() - round_.begun > ROUND_S
            if round_.over or late or not await self._tell(round_, left, delivery, [waiting[i][0] for i in indices]):
                return

    async def _tell(
        self, round_: _ChannelRound, left: _StreamProgress, delivery: Delivery, rows: Sequence[int]
    ) -> bool:
        """Tells one; False when the stream's others have to wait."""
        channel = round_.channel
        try:
            async with asyncio.timeout(DELIVERY_S):
                left.state = await self._notifiers[channel.kind].deliver(
                    channel, delivery, left.stream.snapshot, left.state
                )
        except Exception as error:
            return self._not_told(round_, left, delivery, rows, error)
        round_.told = round_.told or bool(rows)
        left.done += rows[-1:]
        left.dropped |= dict.fromkeys(rows[:-1], FOLDED)
        return True

    def _not_told(
        self, round_: _ChannelRound, left: _StreamProgress, delivery: Delivery, rows: Sequence[int], error: Exception
    ) -> bool:
        """Notes why; True when the delivery is given up, so that the next may be told."""
        if isinstance(error, NotifyError) and error.state is not None:
            left.state = error.state
        what = f"{round_.channel.name}: {delivery.id or 'refresh of ' + delivery.stream}"
        line = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, RetryAfter):
            round_.paused, round_.pause_s = line, max(round_.pause_s, error.after_s)
        elif isinstance(error, ChannelRefused):
            round_.refused = line
        elif isinstance(error, Undeliverable):
            log.warning("%s is left out: %s", what, line)
            left.dropped |= dict.fromkeys(rows, error.reason)
            round_.told = round_.told or bool(rows)
            return True
        elif rows:
            expected = isinstance(error, NotifyError | TimeoutError)
            log.warning("%s not delivered: %s", what, line, exc_info=None if expected else error)
            round_.failed = line
            left.failing, left.attempts = tuple(rows), delivery.attempts + 1
        return False

    # ------------------------------------------------------------------------------------------------------ the result

    def _settlement(self, round_: _ChannelRound) -> Settlement:
        channel = round_.channel
        move = channel_after(
            channel.failures,
            told=round_.told,
            failed=bool(round_.failed),
            pause_s=round_.pause_s,
            jitter=self._jitter(),
        )
        disabled = bool(round_.refused) or move.disable
        reason = round_.refused or round_.failed or round_.paused
        if move.disable and not round_.refused:
            reason = f"{move.failures} failures in a row, the last: {reason}"
        return Settlement(
            channel=replace(channel, failures=move.failures, reason=reason, enabled=not disabled),
            wait_s=move.wait_s,
            streams=tuple(self._settled(left, move.failures) for left in round_.streams),
            notice=self._disabled(channel, reason) if disabled else None,
        )

    def _settled(self, left: _StreamProgress, failures: int) -> DeliveryResult:
        due_in_s, attempts = 0.0, left.attempts
        if left.failing and hopeless(left.attempts, failures):
            left.dropped |= dict.fromkeys(left.failing, NOT_TAKEN)
            attempts = 0
        elif left.failing:
            due_in_s = back_off_s(left.attempts, self._jitter())
        elif not left.done and not left.dropped and left.stream.pending:
            attempts = left.stream.pending[0].delivery.attempts
        return DeliveryResult(
            stream=left.stream,
            done=tuple(left.done),
            dropped=left.dropped,
            state=left.state,
            attempts=attempts,
            due_in_s=due_in_s,
            refresh_in_s=self._refresh_in_s(left.stream),
        )

    def _refresh_in_s(self, stream: Stream) -> float | None:
        """At rest, a job is shown for the last time with its last event."""
        snapshot = stream.snapshot
        if snapshot is None or snapshot.job.state in RESTING_JOB_STATES:
            return None
        return self._notifiers[stream.channel.kind].refresh_s

    def _disabled(self, channel: Channel, reason: str) -> Notice:
        now = self._context.clock.now()
        return Notice(
            id=f"channel-disabled-{channel.id}-{now:%Y%m%dT%H%M%S}",
            kind="channel.disabled",
            team=channel.team,
            message=f"channel {channel.name} is disabled: {reason}; then gpubroker channel enable {channel.name}",
            data={"channel": channel.id, "name": channel.name, "kind": channel.kind, "reason": reason},
        )
