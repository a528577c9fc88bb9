"""Store operations on channels, the outbox, notices and linked Slack users."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.domain.notifications import Channel, Delivery, JobSnapshot, Notice, SlackUser
from broker.ports.notifier import State


@dataclass(frozen=True, kw_only=True)
class ChannelStatus:
    """A channel with its waiting and dropped deliveries."""

    channel: Channel
    waiting: int = 0
    """Number of waiting deliveries."""
    oldest_s: float = 0.0
    """Seconds that the oldest of them has waited."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Deliveries that were abandoned or folded into a later one, by reason."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A delivery with its row number in the outbox."""

    row: int
    delivery: Delivery


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One channel's deliveries about one job (or NOTICES), under our lease."""

    channel: Channel
    name: str
    epoch: int
    pending: tuple[Pending, ...]
    """The oldest deliveries, in order; empty: a refresh is due."""
    state: State | None
    snapshot: JobSnapshot | None


@dataclass(frozen=True, kw_only=True)
class DeliveryResult:
    """Result for a leased stream, fenced by its epoch. The lease is released."""

    stream: Stream
    done: tuple[int, ...] = ()
    """Rows that were delivered."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Rows that are never delivered, with the reason under which each is counted."""
    state: State | None = None
    attempts: int = 0
    """Failures of the oldest remaining delivery."""
    due_in_s: float = 0.0
    """Seconds until the oldest remaining delivery is tried again."""
    refresh_in_s: float | None = None
    """Seconds until the next refresh; None: no refresh."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """Result for a channel and its leased streams, written in one transaction."""

    channel: Channel
    """The channel as claimed, with its new `failures` and `reason`. `enabled` False disables it."""
    wait_s: float = 0.0
    """Seconds for which the channel pauses."""
    streams: tuple[DeliveryResult, ...]
    notice: Notice | None = None
    """Notice to post in the same transaction; None: none."""

    @property
    def moves(self) -> bool:
        """False if the channel is unchanged since its streams were claimed, so that its row is not written."""
        channel, to = self.streams[0].stream.channel, self.channel
        return (channel.failures, channel.reason, True) != (to.failures, to.reason, to.enabled) or self.wait_s > 0


class TenantChannels(Protocol):
    """Part of `TenantStore`: channels of the caller's team.

    An operator also sees the channels of the installation and of every team.
    """

    async def add_channel(self, channel: Channel) -> bool:
        """Store a channel. Returns False when the team has one of that name."""
        ...

    async def channels(self) -> Sequence[ChannelStatus]:
        """Return channels ordered by team and name."""
        ...

    async def write_channel(self, channel: Channel, sealed: bytes | None = None) -> bool:
        """Write a channel's events, config, secrets and `enabled`; enabling clears its failures.

        Returns False when the channel is gone, or its stored secrets are not `sealed` (None: not compared).
        """
        ...

    async def delete_channel(self, channel_id: str) -> bool:
        """Delete a channel and its waiting deliveries."""
        ...


class ChannelStore(Protocol):
    """Part of `Store`: the outbox, as its controller uses it."""

    async def claim_streams(
        self, kinds: Sequence[str], *, busy: Sequence[str], owner: str, lease_s: float, limit: int, depth: int
    ) -> Sequence[Stream]:
        """Lease due streams of channels of these kinds, at most `limit` per channel.

        Each stream has at most `depth` deliveries. Channels named in `busy` are skipped; a channel that has just failed
        gives a single stream, as a probe.
        """
        ...

    async def settle(self, settlement: Settlement) -> int:
        """Write a settlement atomically, and return how many streams were still leased.

        Streams whose lease was lost are left unchanged.
        """
        ...

    async def post(self, notice: Notice) -> bool:
        """Post a notice to the channels of its team and of the installation.

        Returns False when its id was posted before.
        """
        ...

    async def trim_outbox(self, *, age_s: float, rows: int) -> int:
        """Drop deliveries older than `age_s` and the oldest beyond `rows` per channel, and return how many."""
        ...

    async def first_time(self, key: str, *, for_s: float) -> bool:
        """Return True for the first call with this key within `for_s` seconds, over all brokers; prevents replays."""
        ...


class TenantSlack(Protocol):
    """Part of `TenantStore`: a team sees its own links, an operator those of every team."""

    async def put_slack_user(self, link: SlackUser) -> None:
        """Create a link, or change the one that this user has in the team."""
        ...

    async def slack_users(self, workspace: str | None = None, user: str | None = None) -> Sequence[SlackUser]:
        """Return links by team, workspace and user, optionally of one workspace and user."""
        ...

    async def delete_slack_user(self, link: SlackUser) -> bool:
        """Delete a link. Returns False when it is gone already."""
        ...
