"""One round of one channel: delivers the claimed streams, and returns the result as one `Settlement`.

Used by the outbox. Streams are delivered concurrently, the deliveries of one stream one after the other.
Decisions: `broker.reporting.delivery_round`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from broker.domain.errors import NotifyError, RetryAfter, Undeliverable
from broker.domain.notifications import Delivery
from broker.ports import Clock, DeliveryResult, Notifier, Settlement, State, Stream
from broker.reporting.delivery import FOLDED, fold
from broker.reporting.delivery_round import (
    ChannelResult,
    DeliveryFailure,
    StreamResult,
    close_channel,
    close_stream,
    failure_of,
    refresh_in_s,
)

log = logging.getLogger(__name__)

ROUND_S = 25.0
"""Seconds after which a round begins no further delivery, so that its lease outlasts the round."""
DELIVERY_S = 25.0
"""Timeout of one delivery, in seconds."""
AT_ONCE = 16
"""Maximum number of concurrent deliveries of one channel."""


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

    @property
    def result(self) -> StreamResult:
        pending = self.stream.pending
        return StreamResult(
            done=tuple(self.done),
            dropped=self.dropped,
            failing=self.failing,
            attempts=self.attempts,
            earlier_attempts=pending[0].delivery.attempts if pending else 0,
        )


class ChannelRound:
    """Round of the channel of `streams`. `jitter()` returns a number in [0, 1)."""

    def __init__(
        self, notifier: Notifier, streams: Sequence[Stream], *, clock: Clock, jitter: Callable[[], float]
    ) -> None:
        self._notifier, self._clock, self._jitter = notifier, clock, jitter
        self._result = ChannelResult(channel=streams[0].channel)
        self._streams = [_StreamProgress(stream=stream, state=stream.state) for stream in streams]
        self._begun = clock.monotonic()

    async def run(self) -> Settlement:
        """Deliver all streams, and return what is written about them and their channel."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def run_stream(progress: _StreamProgress) -> None:
            async with gate:
                await self._run_stream(progress)

        async with asyncio.TaskGroup() as group:
            for progress in self._streams:
                group.create_task(run_stream(progress))
        return self._settlement()

    async def _run_stream(self, progress: _StreamProgress) -> None:
        stream = progress.stream
        waiting = [(pending.row, pending.delivery) for pending in stream.pending]
        folded = fold([delivery for _, delivery in waiting]) or [(Delivery(stream=stream.name), ())]
        for delivery, indices in folded:
            rows = [waiting[index][0] for index in indices]
            if self._is_over or not await self._deliver(progress, delivery, rows):
                return

    @property
    def _is_over(self) -> bool:
        """True if nothing more is sent: the channel asked for a pause, refuses all deliveries, or time is over."""
        is_late = self._clock.monotonic() - self._begun > ROUND_S
        return is_late or bool(self._result.paused or self._result.refused)

    async def _deliver(self, progress: _StreamProgress, delivery: Delivery, rows: Sequence[int]) -> bool:
        """Deliver one notification. Return False if later notifications of the stream must wait."""
        channel, snapshot = self._result.channel, progress.stream.snapshot
        try:
            async with asyncio.timeout(DELIVERY_S):
                progress.state = await self._notifier.deliver(channel, delivery, snapshot, progress.state)
        except Exception as error:
            return self._record_failure(progress, delivery, rows, error)
        self._record_delivered(rows)
        progress.done += rows[-1:]
        progress.dropped |= dict.fromkeys(rows[:-1], FOLDED)
        return True

    def _record_delivered(self, rows: Sequence[int]) -> None:
        self._result = replace(self._result, is_delivered=self._result.is_delivered or bool(rows))

    def _record_failure(
        self, progress: _StreamProgress, delivery: Delivery, rows: Sequence[int], error: Exception
    ) -> bool:
        """Record an error. Return True if the delivery is given up, so that the next one may follow."""
        if isinstance(error, NotifyError) and error.state is not None:
            progress.state = error.state
        description = f"{self._result.channel.name}: {delivery.id or 'refresh of ' + delivery.stream}"
        line = " ".join(str(error).split()) or type(error).__name__
        failure = failure_of(error, is_refresh=not rows)
        if isinstance(error, RetryAfter):
            self._result = replace(self._result, paused=line, pause_s=max(self._result.pause_s, error.after_s))
        elif isinstance(error, Undeliverable):
            log.warning("%s is left out: %s", description, line)
            progress.dropped |= dict.fromkeys(rows, error.reason)
            self._record_delivered(rows)
        elif failure is DeliveryFailure.REFUSED:
            self._result = replace(self._result, refused=line)
        elif failure is DeliveryFailure.REPEATED:
            expected = isinstance(error, NotifyError | TimeoutError)
            log.warning("%s not delivered: %s", description, line, exc_info=None if expected else error)
            self._result = replace(self._result, failed=line)
            progress.failing, progress.attempts = tuple(rows), delivery.attempts + 1
        return failure is DeliveryFailure.GIVEN_UP

    def _settlement(self) -> Settlement:
        decision = close_channel(self._result, self._clock.now(), jitter=self._jitter())
        return Settlement(
            channel=decision.channel,
            wait_s=decision.wait_s,
            streams=tuple(self._stream_result(progress, decision.channel.failures) for progress in self._streams),
            notice=decision.notice,
        )

    def _stream_result(self, progress: _StreamProgress, channel_failures: int) -> DeliveryResult:
        jitter = self._jitter() if progress.failing else 0.0
        decision = close_stream(progress.result, channel_failures=channel_failures, jitter=jitter)
        return DeliveryResult(
            stream=progress.stream,
            done=tuple(progress.done),
            dropped=decision.dropped,
            state=progress.state,
            attempts=decision.attempts,
            due_in_s=decision.due_in_s,
            refresh_in_s=refresh_in_s(progress.stream.snapshot, self._notifier.refresh_s),
        )
