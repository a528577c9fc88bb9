"""The tables of channels and their outbox in memory."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from broker.domain.job import Event
from broker.domain.notifications import LOG_CHANNEL, NOTICES, Channel, Delivery, Notice
from broker.ports import State
from broker.reporting.delivery import is_subscribed

LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass
class ChannelRow:
    value: Channel
    not_before: datetime = LONG_AGO


@dataclass
class StreamRow:
    """One channel's deliveries about one job, by their numbers."""

    used_at: datetime
    waiting: dict[int, tuple[Delivery, datetime]] = field(default_factory=dict)
    due_at: datetime = LONG_AGO
    attempts: int = 0
    refresh_at: datetime | None = None
    state: State | None = None
    epoch: int = 0
    lease_until: datetime | None = None

    def free(self, now: datetime) -> bool:
        return self.lease_until is None or self.lease_until <= now


class OutboxTables:
    """Outbox tables with the rows of all teams."""

    def __init__(self, now: datetime) -> None:
        log = Channel(id=LOG_CHANNEL, kind="log", name=LOG_CHANNEL, team=None, created_at=now)
        self.channels: dict[str, ChannelRow] = {log.id: ChannelRow(value=log)}
        self.streams: dict[tuple[str, str], StreamRow] = {}
        self.notices: dict[str, Notice] = {}
        self.dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seen: dict[str, datetime] = {}
        self._rows = 0

    def streams_of(self, channel_id: str) -> Iterator[tuple[str, StreamRow]]:
        return ((name, row) for (own, name), row in self.streams.items() if own == channel_id)

    def tell_event(self, event: Event, team: str, now: datetime) -> None:
        self._tell(Delivery(stream=event.job_id, event=event), team, now)

    def tell_notice(self, notice: Notice, now: datetime) -> None:
        self.notices[notice.id] = notice
        self._tell(Delivery(stream=NOTICES, notice=notice), notice.team, now)

    def _tell(self, delivery: Delivery, team: str | None, now: datetime) -> None:
        for row in self.channels.values():
            channel = row.value
            if channel.enabled and channel.team in (None, team) and is_subscribed(channel.events, delivery.kind):
                stream = self.streams.setdefault((channel.id, delivery.stream), StreamRow(used_at=now))
                self._rows += 1
                stream.waiting[self._rows] = (delivery, now)
                stream.used_at = now

    def remove(self, channel_id: str) -> None:
        del self.channels[channel_id]
        self.dropped.pop(channel_id, None)
        self.streams = {key: row for key, row in self.streams.items() if key[0] != channel_id}
