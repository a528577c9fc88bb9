"""Decides the results of one round of deliveries through a channel. Used by the outbox controller.

A failure is named by `failure_of`; the end of a round by `close_channel` and `close_stream`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from broker.domain.errors import ChannelRefused, RetryAfter, Undeliverable
from broker.domain.job import RESTING_JOB_STATES
from broker.domain.notifications import Channel, JobSnapshot, Notice
from broker.reporting.delivery import NOT_TAKEN, back_off_s, channel_after, hopeless


class DeliveryFailure(StrEnum):
    """Consequences of a failed delivery."""

    PAUSED = "paused"
    """The receiver asks for a pause: nothing more is sent in this round."""
    REFUSED = "refused"
    """The receiver accepts nothing any more: the channel is disabled."""
    GIVEN_UP = "given up"
    """The receiver will never accept this delivery: the next one follows."""
    REPEATED = "repeated"
    """The delivery is repeated later, and the later deliveries of its stream wait."""
    SKIPPED = "skipped"
    """A refresh failed; the next refresh repeats it."""


def failure_of(error: Exception, *, is_refresh: bool) -> DeliveryFailure:
    """Return the consequence of an error. `is_refresh`: the delivery holds no event and no notice."""
    match error:
        case RetryAfter():
            return DeliveryFailure.PAUSED
        case ChannelRefused():
            return DeliveryFailure.REFUSED
        case Undeliverable():
            return DeliveryFailure.GIVEN_UP
    return DeliveryFailure.SKIPPED if is_refresh else DeliveryFailure.REPEATED


@dataclass(frozen=True, kw_only=True)
class ChannelResult:
    """Facts about one channel at the end of a round."""

    channel: Channel
    """The channel as it was claimed."""
    is_delivered: bool = False
    """True if at least one delivery was accepted or given up."""
    failed: str = ""
    """Latest error of a delivery that is repeated; empty: none."""
    paused: str = ""
    """Latest error with which the receiver asked for a pause; empty: none."""
    pause_s: float = 0.0
    refused: str = ""
    """Error with which the receiver refused all deliveries; empty: it did not."""


@dataclass(frozen=True, kw_only=True)
class ChannelDecision:
    """Next state of a channel."""

    channel: Channel
    wait_s: float
    """Seconds for which the channel pauses."""
    notice: Notice | None
    """Notice that the channel is disabled; None: the channel stays enabled."""


def close_channel(result: ChannelResult, now: datetime, *, jitter: float) -> ChannelDecision:
    """Return the channel after a round. A refusal, or too many consecutive failures, disables it."""
    channel = result.channel
    move = channel_after(
        channel.failures,
        delivered=result.is_delivered,
        failed=bool(result.failed),
        pause_s=result.pause_s,
        jitter=jitter,
    )
    is_disabled = bool(result.refused) or move.disable
    reason = result.refused or result.failed or result.paused
    if move.disable and not result.refused:
        reason = f"{move.failures} failures in a row, the last: {reason}"
    return ChannelDecision(
        channel=replace(channel, failures=move.failures, reason=reason, enabled=not is_disabled),
        wait_s=move.wait_s,
        notice=_disabled_notice(channel, reason, now) if is_disabled else None,
    )


@dataclass(frozen=True, kw_only=True)
class StreamResult:
    """Facts about one stream at the end of a round."""

    done: tuple[int, ...] = ()
    """Rows that were delivered."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Rows that are never delivered, with the reason under which each is counted."""
    failing: tuple[int, ...] = ()
    """Rows of the delivery that failed; empty: none did."""
    attempts: int = 0
    """Failures of that delivery, this one included."""
    earlier_attempts: int = 0
    """Failures of the oldest delivery before this round."""


@dataclass(frozen=True, kw_only=True)
class StreamDecision:
    """Next state of a stream."""

    dropped: Mapping[int, str]
    attempts: int
    """Failures of the oldest remaining delivery."""
    due_in_s: float
    """Seconds until the oldest remaining delivery is tried again."""


def close_stream(result: StreamResult, *, channel_failures: int, jitter: float) -> StreamDecision:
    """Return the decision on a stream's oldest remaining delivery.

    `channel_failures`: consecutive failures of the channel, this round included.
    """
    if result.failing and hopeless(result.attempts, channel_failures):
        dropped = {**result.dropped, **dict.fromkeys(result.failing, NOT_TAKEN)}
        return StreamDecision(dropped=dropped, attempts=0, due_in_s=0.0)
    if result.failing:
        due_in_s = back_off_s(result.attempts, jitter)
        return StreamDecision(dropped=result.dropped, attempts=result.attempts, due_in_s=due_in_s)
    is_untouched = not result.done and not result.dropped
    attempts = result.earlier_attempts if is_untouched else 0
    return StreamDecision(dropped=result.dropped, attempts=attempts, due_in_s=0.0)


def refresh_in_s(snapshot: JobSnapshot | None, every_s: float | None) -> float | None:
    """Return when a stream is refreshed; None: never, because a terminal job is shown with its last event.

    `every_s`: interval of the channel's notifier.
    """
    return None if snapshot is None or snapshot.job.state in RESTING_JOB_STATES else every_s


def _disabled_notice(channel: Channel, reason: str, now: datetime) -> Notice:
    return Notice(
        id=f"channel-disabled-{channel.id}-{now:%Y%m%dT%H%M%S}",
        kind="channel.disabled",
        team=channel.team,
        message=f"channel {channel.name} is disabled: {reason}; then gpubroker channel enable {channel.name}",
        data={"channel": channel.id, "name": channel.name, "kind": channel.kind, "reason": reason},
    )
