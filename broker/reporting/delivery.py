"""What is told, when it is told again, and when it is given up."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.domain.notifications import Delivery

BACK_OFF_S = (1.0, 300.0)
"""After the first failure in a row, and at most."""
DISABLE_AFTER = 400
"""Failures in a row of a whole channel, at BACK_OFF_S about a day."""
GIVE_UP_AFTER = 20
"""Failures of one delivery while its channel takes others."""
MAX_PAUSE_S = 3600.0
"""However long a receiver asks for."""
PROGRESS = frozenset(
    {
        "attempt.booting",
        "attempt.destroy_failed",
        "attempt.grant_failing",
        "job.overrun_forecast",
        "job.waiting",
    }
)
"""Kinds of which only the latest is worth telling to somebody who was away."""

NOT_TAKEN = "never taken"
"""The reason under which given-up deliveries are counted."""
FOLDED = "folded"
"""And those that a later one replaced."""


def wants(patterns: Sequence[str], kind: str) -> bool:
    """True when a channel with these patterns is told about `kind`: none at all, the kind itself, or `prefix*`."""
    return not patterns or any(
        kind == pattern or (pattern.endswith("*") and kind.startswith(pattern[:-1])) for pattern in patterns
    )


def fold(waiting: Sequence[Delivery]) -> list[tuple[Delivery, tuple[int, ...]]]:
    """What is told of one stream's waiting deliveries, each with the indices of all that it stands for.

    Of a kind in PROGRESS only the latest is, in its own place; all others are, in their order.
    """
    last = {delivery.kind: index for index, delivery in enumerate(waiting)}
    earlier: defaultdict[str, list[int]] = defaultdict(list)
    told = []
    for index, delivery in enumerate(waiting):
        replaced = earlier[delivery.kind]
        if delivery.kind in PROGRESS and last[delivery.kind] != index:
            replaced.append(index)
            continue
        told.append((replace(delivery, folded=len(replaced)), (*replaced, index)))
    return told


def back_off_s(failures: int, jitter: float) -> float:
    """Seconds to wait after so many failures in a row (1 or more); `jitter` in [0, 1) takes off up to half."""
    least, most = BACK_OFF_S
    doublings = min(failures - 1, 16)
    return float(min(most, least * 2.0**doublings) * (1 - jitter / 2))


@dataclass(frozen=True, kw_only=True)
class ChannelMove:
    """What follows for a channel."""

    failures: int
    wait_s: float
    disable: bool


def channel_after(failures: int, *, told: bool, failed: bool, pause_s: float, jitter: float) -> ChannelMove:
    """After a round in which it took something (`told`), or something failed, or it asked for a pause.

    A pause is an answer, and no failure. A channel that takes anything works, whatever else failed.
    """
    now = 0 if told else failures + failed
    wait_s = back_off_s(now, jitter) if failed and now else 0.0
    return ChannelMove(failures=now, wait_s=max(wait_s, min(pause_s, MAX_PAUSE_S)), disable=now >= DISABLE_AFTER)


def hopeless(attempts: int, channel_failures: int) -> bool:
    """True for a delivery that failed `attempts` times while its channel took others: it holds up its stream for ever.

    While nothing at all goes through, the channel's own failures in a row keep pace, and nothing is given up.
    """
    return attempts >= GIVE_UP_AFTER and channel_failures < attempts
