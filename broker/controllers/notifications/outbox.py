"""Outbox: delivers the notifications of every channel, at least once, in order for each job.

Channels, and the streams of a channel, are delivered concurrently, so a slow or broken one delays no other. The result
of a channel's round is written in one step. Steps: claim streams, deliver in order, settle the round.
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
"""Seconds after which a round begins no further delivery, so that its lease outlasts the round."""
DELIVERY_S = 25.0
"""Timeout of one delivery, in seconds."""
STREAMS = 64
"""Maximum number of streams of one channel and round."""
DEPTH = 32
"""Maximum number of deliveries of one stream and round."""
AT_ONCE = 16
"""Maximum number of concurrent deliveries of one channel."""
TRIM_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OutboxRetention:
    """Limits of the deliveries that wait for a channel."""

    age_s: float = 7 * 86_400.0
    """Seconds after which a delivery is given up."""
    rows: int = 100_000
    """Maximum number of deliveries of one channel."""


@dataclass
class _ChannelRound:
    """Result of one channel's round so far."""

    channel: Channel
    begun: float
    delivered: bool = False
    """True if at least one delivery was accepted or given up."""
    failed: str = ""
    paused: str = ""
    pause_s: float = 0.0
    refused: str = ""
    streams: list["_StreamProgress"] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """True if nothing more is sent: the channel asked for a pause, or refuses all deliveries."""
        return bool(self.paused or self.refused)


@dataclass
class _StreamProgress:
    """Result of one stream in a round so far."""

    stream: Stream
    state: State | None
    done: list[int] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    failing: tuple[int, ...] = ()
    """Rows of the delivery that failed."""
    attempts: int = 0


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
        """Start a round for every channel with due deliveries that has none. Return when a round ends, or after a poll.

        Raises the error of a round.
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
        return await self._ended()

    async def _ended(self) -> bool:
        """Wait for the first round to end, for a poll at most. Return True if one did."""
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

    # -------------------------------------------------------------------------------------------------------- a round

    async def _round(self, streams: Sequence[Stream]) -> None:
        round_ = _ChannelRound(channel=streams[0].channel, begun=self._context.clock.monotonic())
        gate = asyncio.Semaphore(AT_ONCE)

        async def run_stream(stream: Stream) -> None:
            async with gate:
                await self._stream(round_, stream)

        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(run_stream(stream))
        await self._context.store.settle(self._settlement(round_))

    async def _stream(self, round_: _ChannelRound, stream: Stream) -> None:
        progress = _StreamProgress(stream=stream, state=stream.state)
        round_.streams.append(progress)
        waiting = [(pending.row, pending.delivery) for pending in stream.pending]
        folded = fold([delivery for _, delivery in waiting]) or [(Delivery(stream=stream.name), ())]
        for delivery, indices in folded:
            late = self._context.clock.monotonic() - round_.begun > ROUND_S
            if (
                round_.over
                or late
                or not await self._deliver(round_, progress, delivery, [waiting[i][0] for i in indices])
            ):
                return

    async def _deliver(
        self, round_: _ChannelRound, progress: _StreamProgress, delivery: Delivery, rows: Sequence[int]
    ) -> bool:
        """Deliver one notification. Return False if later notifications of the stream must wait."""
        channel = round_.channel
        try:
            async with asyncio.timeout(DELIVERY_S):
                progress.state = await self._notifiers[channel.kind].deliver(
                    channel, delivery, progress.stream.snapshot, progress.state
                )
        except Exception as error:
            return self._note_failure(round_, progress, delivery, rows, error)
        round_.delivered = round_.delivered or bool(rows)
        progress.done += rows[-1:]
        progress.dropped |= dict.fromkeys(rows[:-1], FOLDED)
        return True

    def _note_failure(
        self,
        round_: _ChannelRound,
        progress: _StreamProgress,
        delivery: Delivery,
        rows: Sequence[int],
        error: Exception,
    ) -> bool:
        """Record an error. Return True if the delivery is given up, so that the next one may follow."""
        if isinstance(error, NotifyError) and error.state is not None:
            progress.state = error.state
        description = f"{round_.channel.name}: {delivery.id or 'refresh of ' + delivery.stream}"
        line = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, RetryAfter):
            round_.paused, round_.pause_s = line, max(round_.pause_s, error.after_s)
        elif isinstance(error, ChannelRefused):
            round_.refused = line
        elif isinstance(error, Undeliverable):
            log.warning("%s is left out: %s", description, line)
            progress.dropped |= dict.fromkeys(rows, error.reason)
            round_.delivered = round_.delivered or bool(rows)
            return True
        elif rows:
            expected = isinstance(error, NotifyError | TimeoutError)
            log.warning("%s not delivered: %s", description, line, exc_info=None if expected else error)
            round_.failed = line
            progress.failing, progress.attempts = tuple(rows), delivery.attempts + 1
        return False

    # ------------------------------------------------------------------------------------------------------ the result

    def _settlement(self, round_: _ChannelRound) -> Settlement:
        channel = round_.channel
        following = channel_after(
            channel.failures,
            told=round_.delivered,
            failed=bool(round_.failed),
            pause_s=round_.pause_s,
            jitter=self._jitter(),
        )
        disabled = bool(round_.refused) or following.disable
        reason = round_.refused or round_.failed or round_.paused
        if following.disable and not round_.refused:
            reason = f"{following.failures} failures in a row, the last: {reason}"
        return Settlement(
            channel=replace(channel, failures=following.failures, reason=reason, enabled=not disabled),
            wait_s=following.wait_s,
            streams=tuple(self._result(progress, following.failures) for progress in round_.streams),
            notice=self._disabled(channel, reason) if disabled else None,
        )

    def _result(self, progress: _StreamProgress, failures: int) -> DeliveryResult:
        due_in_s, attempts = 0.0, progress.attempts
        if progress.failing and hopeless(progress.attempts, failures):
            progress.dropped |= dict.fromkeys(progress.failing, NOT_TAKEN)
            attempts = 0
        elif progress.failing:
            due_in_s = back_off_s(progress.attempts, self._jitter())
        elif not progress.done and not progress.dropped and progress.stream.pending:
            attempts = progress.stream.pending[0].delivery.attempts
        return DeliveryResult(
            stream=progress.stream,
            done=tuple(progress.done),
            dropped=progress.dropped,
            state=progress.state,
            attempts=attempts,
            due_in_s=due_in_s,
            refresh_in_s=self._refresh_in_s(progress.stream),
        )

    def _refresh_in_s(self, stream: Stream) -> float | None:
        """Return when a stream is refreshed; None: never, because a terminal job is shown with its last event."""
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
