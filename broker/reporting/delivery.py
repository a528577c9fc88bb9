"""Rules of deliveries: what is sent, retries, and when a delivery is abandoned."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.domain.notifications import Delivery

BACK_OFF_S = (1.0, 300.0)
"""Back-off in seconds: after the first of several consecutive failures, and the maximum."""
DISABLE_AFTER = 400
"""Consecutive failures after which a channel is disabled: about a day at BACK_OFF_S."""
GIVE_UP_AFTER = 20
"""Failures after which a delivery is abandoned while its channel accepts others."""
MAX_PAUSE_S = 3600.0
"""Longest pause that a receiver may request."""
PROGRESS = frozenset(
    {
        "attempt.booting",
        "attempt.destroy_failed",
        "attempt.grant_failing",
        "job.overrun_forecast",
        "job.waiting",
    }
)
"""Event kinds of which a stream sends only the latest waiting delivery; earlier ones are folded into it."""

NOT_TAKEN = "never taken"
"""Reason under which abandoned deliveries are counted."""
FOLDED = "folded"
"""Reason under which replaced deliveries are counted."""


def is_subscribed(patterns: Sequence[str], kind: str) -> bool:
    """Return True if a channel receives `kind`: `patterns` is empty, or has the kind or a `prefix*` that matches."""
    return not patterns or any(
        kind == pattern or (pattern.endswith("*") and kind.startswith(pattern[:-1])) for pattern in patterns
    )


def fold(waiting: Sequence[Delivery]) -> list[tuple[Delivery, tuple[int, ...]]]:
    """Return the deliveries to send for a stream, each with the indices of all deliveries that it covers.

    Of a kind in PROGRESS only the latest is sent, in its own position. All others are sent in their order.
    """
    last = {delivery.kind: index for index, delivery in enumerate(waiting)}
    earlier: defaultdict[str, list[int]] = defaultdict(list)
    folded = []
    for index, delivery in enumerate(waiting):
        replaced = earlier[delivery.kind]
        if delivery.kind in PROGRESS and last[delivery.kind] != index:
            replaced.append(index)
            continue
        folded.append((replace(delivery, folded=len(replaced)), (*replaced, index)))
    return folded


def back_off_s(failures: int, jitter: float) -> float:
    """Return the wait in seconds after consecutive `failures` (1 or more); `jitter` in [0, 1) subtracts up to half."""
    first_s, max_s = BACK_OFF_S
    doublings = min(failures - 1, 16)
    return float(min(max_s, first_s * 2.0**doublings) * (1 - jitter / 2))


@dataclass(frozen=True, kw_only=True)
class ChannelMove:
    """Next state of a channel."""

    failures: int
    wait_s: float
    disable: bool


def channel_after(failures: int, *, delivered: bool, failed: bool, pause_s: float, jitter: float) -> ChannelMove:
    """Return the state after a round with a success (`delivered`), a failure, or a requested pause.

    A pause is not a failure. A success resets the failures, even if other deliveries failed in the same round.
    """
    in_a_row = 0 if delivered else failures + failed
    wait_s = back_off_s(in_a_row, jitter) if failed and in_a_row else 0.0
    return ChannelMove(
        failures=in_a_row, wait_s=max(wait_s, min(pause_s, MAX_PAUSE_S)), disable=in_a_row >= DISABLE_AFTER
    )


def hopeless(attempts: int, channel_failures: int) -> bool:
    """Return True for a delivery that failed `attempts` times while its channel accepted others, and blocks its stream.

    While all deliveries fail, the channel's own failures in a row grow as well, and none is abandoned.
    """
    return attempts >= GIVE_UP_AFTER and channel_failures < attempts
