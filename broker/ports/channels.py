"""The doors to channels, the outbox and notices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.domain.notifications import Channel, Delivery, JobSnapshot, Notice
from broker.ports.notifier import State


@dataclass(frozen=True, kw_only=True)
class ChannelStatus:
    """A channel with what waits for it and what it will never get."""

    channel: Channel
    waiting: int = 0
    """Deliveries."""
    oldest_s: float = 0.0
    """Seconds that the oldest of them has waited."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Deliveries that were given up or folded into a later one, by reason."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A delivery with the outbox's own number."""

    row: int
    delivery: Delivery


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One channel's deliveries about one job (or NOTICES), under our lease."""

    channel: Channel
    name: str
    epoch: int
    pending: tuple[Pending, ...]
    """The oldest ones, in order; empty: a refresh is due."""
    state: State | None
    snapshot: JobSnapshot | None


@dataclass(frozen=True, kw_only=True)
class DeliveryResult:
    """What became of a leased stream, fenced by its epoch. The lease is given up."""

    stream: Stream
    done: tuple[int, ...] = ()
    """Rows that were delivered."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Rows that nobody will be told, each with the reason under which it is counted."""
    state: State | None = None
    attempts: int = 0
    """Failures of the oldest delivery that is left."""
    due_in_s: float = 0.0
    """When the oldest one left is tried again."""
    refresh_in_s: float | None = None
    """None: no refresh."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What became of a channel and its leased streams: one transaction."""

    channel: Channel
    """As it was claimed, with its new `failures` and `reason`; not `enabled`: disabled now."""
    wait_s: float = 0.0
    """Nothing goes through the channel before this."""
    streams: tuple[DeliveryResult, ...]
    notice: Notice | None = None
    """Posted with it."""

    @property
    def moves(self) -> bool:
        """False when the channel is as it was claimed: its row is not written."""
        was, to = self.streams[0].stream.channel, self.channel
        return (was.failures, was.reason, True) != (to.failures, to.reason, to.enabled) or self.wait_s > 0


class TenantChannels(Protocol):
    """Part of `TenantStore`: a team sees its own channels; an operator also the installation's, and every team's."""

    async def add_channel(self, channel: Channel) -> bool:
        """False when the team has one of that name."""
        ...

    async def channels(self) -> Sequence[ChannelStatus]:
        """By team and name."""
        ...

    async def write_channel(self, channel: Channel) -> bool:
        """Events, config, secrets and whether it is enabled; enabling forgets its failures. False when it is gone."""
        ...

    async def delete_channel(self, channel_id: str) -> bool:
        """With all that waits for it."""
        ...


class ChannelStore(Protocol):
    """Part of `Store`: the outbox, as its controller sees it."""

    async def claim_streams(
        self, kinds: Sequence[str], *, busy: Sequence[str], owner: str, lease_s: float, limit: int, depth: int
    ) -> Sequence[Stream]:
        """Due streams of channels of these kinds, at most `limit` a channel with at most `depth` deliveries each.

        Channels named in `busy` are left out; one that has just failed gives a single stream, as a probe.
        """
        ...

    async def settle(self, settlement: Settlement) -> int:
        """All of it or nothing; how many streams were still leased. The others are left as they are."""
        ...

    async def post(self, notice: Notice) -> bool:
        """Tells the channels of the notice's team and the installation's; False when its id was posted before."""
        ...

    async def trim_outbox(self, *, age_s: float, rows: int) -> int:
        """Drops deliveries older than `age_s`, and the oldest beyond `rows` a channel, counted; how many."""
        ...

    async def first_time(self, key: str, *, for_s: float) -> bool:
        """True once a key within `for_s`, whichever broker asks: against replays."""
        ...
