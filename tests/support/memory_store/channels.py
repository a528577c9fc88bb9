"""Channels and the outbox in memory."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from broker.domain.ids import JobId
from broker.domain.notifications import NOTICES, Channel, JobSnapshot, Notice
from broker.ports import ChannelStatus, DeliveryResult, Pending, Settlement, Stream
from broker.store.rules import channels as channel_rules
from broker.store.rules import fences
from broker.store.rules.channels import IDLE_S, TOO_MANY, TOO_OLD
from tests.support.memory_store.outbox_tables import LONG_AGO, ChannelRow, StreamRow
from tests.support.memory_store.state import MemoryPart


class MemoryTenantChannels(MemoryPart):
    async def add_channel(self, channel: Channel) -> bool:
        tables = self._state.outbox
        if not self._sees(channel.team or "") or channel.team not in {None, *self._state.teams}:
            raise fences.refused(f"channel {channel.name}", "channels_team")
        if any((row.value.team, row.value.name) == (channel.team, channel.name) for row in tables.channels.values()):
            return False
        kept = replace(channel, created_at=self._state.clock.now(), failures=0)
        tables.channels[channel.id] = ChannelRow(value=kept)
        self._state.write_audit(channel_rules.added(self._tenant, channel))
        return True

    async def channels(self) -> Sequence[ChannelStatus]:
        seen = (row.value for row in self._state.outbox.channels.values() if self._sees(row.value.team or ""))
        return [self._status(channel) for channel in sorted(seen, key=lambda one: (one.team or "", one.name))]

    def _status(self, channel: Channel) -> ChannelStatus:
        tables, now = self._state.outbox, self._state.clock.now()
        waiting = [at for _, row in tables.streams_of(channel.id) for _, at in row.waiting.values()]
        return ChannelStatus(
            channel=channel,
            waiting=len(waiting),
            oldest_s=(now - min(waiting, default=now)).total_seconds(),
            dropped=dict(tables.dropped[channel.id]),
        )

    async def write_channel(self, channel: Channel, sealed: bytes | None = None) -> bool:
        row = self._state.outbox.channels.get(channel.id)
        if row is None or not self._sees(row.value.team or "") or sealed not in (None, row.value.sealed):
            return False
        was = row.value
        reason = was.reason if was.enabled and channel.enabled else "" if channel.enabled else channel.reason
        row.value = replace(
            was, events=channel.events, config=channel.config, sealed=channel.sealed, enabled=channel.enabled,
            reason=fences.clean(reason), failures=was.failures if was.enabled else 0,
        )  # fmt: skip
        if not was.enabled:
            row.not_before = LONG_AGO
        self._state.write_audit(channel_rules.changed(self._tenant, was, channel))
        return True

    async def delete_channel(self, channel_id: str) -> bool:
        row = self._state.outbox.channels.get(channel_id)
        if row is None or not self._sees(row.value.team or ""):
            return False
        self._state.outbox.remove(channel_id)
        self._state.write_audit(channel_rules.removed(self._tenant, row.value))
        return True


class MemoryChannels(MemoryPart):
    """`ports.ChannelStore`: the part without a tenant, for the controllers."""

    async def claim_streams(
        self, kinds: Sequence[str], *, busy: Sequence[str], owner: str, lease_s: float, limit: int, depth: int
    ) -> Sequence[Stream]:
        now, found = self._state.clock.now(), []
        for row in self._state.outbox.channels.values():
            channel = row.value
            if channel.enabled and channel.kind in kinds and channel.id not in busy and row.not_before <= now:
                for name, stream in self._due(channel, now, limit):
                    stream.epoch += 1
                    stream.lease_until = now + timedelta(seconds=lease_s)
                    found.append(self._leased(channel, name, stream, depth))
        return found

    def _due(self, channel: Channel, now: datetime, limit: int) -> list[tuple[str, StreamRow]]:
        free = [(name, row) for name, row in self._state.outbox.streams_of(channel.id) if row.free(now)]
        due = [one for one in free if one[1].waiting and one[1].due_at <= now]
        due = sorted(due, key=lambda one: one[1].due_at)[: 1 if channel.failures else limit]
        if channel.failures:
            return due
        fresh = [one for one in free if not one[1].waiting and one[1].refresh_at and one[1].refresh_at <= now]
        return due + sorted(fresh, key=lambda one: one[1].refresh_at or now)[:limit]

    def _leased(self, channel: Channel, name: str, row: StreamRow, depth: int) -> Stream:
        pending = [
            Pending(row=number, delivery=replace(delivery, attempts=0 if place else row.attempts))
            for place, (number, (delivery, _)) in enumerate(list(row.waiting.items())[:depth])
        ]
        return Stream(
            channel=channel,
            name=name,
            epoch=row.epoch,
            pending=tuple(pending),
            state=row.state,
            snapshot=self._snapshot(JobId(name)) if name != NOTICES else None,
        )

    def _snapshot(self, job_id: JobId) -> JobSnapshot:
        attempts = (self._state.attempts[own].value for own in self._state.of_job[job_id])
        return JobSnapshot(job=self._state.jobs[job_id].value, attempts=tuple(sorted(attempts, key=lambda a: a.number)))

    async def settle(self, settlement: Settlement) -> int:
        tables, to, now = self._state.outbox, settlement.channel, self._state.clock.now()
        row = tables.channels.get(to.id)
        if row is None:
            return 0
        held = 0
        for settled in settlement.streams:
            stream = tables.streams.get((to.id, settled.stream.name))
            if stream is not None and stream.epoch == settled.stream.epoch:
                held += 1
                tables.dropped[to.id].update(settled.dropped.values())
                _settle(stream, settled, now)
        if settlement.moves:
            was, reason = row.value, fences.clean(to.reason)
            enabled = was.enabled and to.enabled
            row.value = replace(
                was, failures=to.failures, reason=reason if was.enabled else was.reason, enabled=enabled
            )
            row.not_before = max(row.not_before, now + timedelta(seconds=settlement.wait_s))
        if settlement.notice is not None:
            await self.post(settlement.notice)
        return held

    async def post(self, notice: Notice) -> bool:
        if notice.id in self._state.outbox.notices:
            return False
        if not channel_rules.NOTICE_ID.fullmatch(notice.id):
            raise fences.refused(f"notice {notice.id}", "notices_id")
        if notice.team not in {None, *self._state.teams}:
            raise fences.refused(f"notice {notice.id}", "notices_team")
        now = self._state.clock.now()
        self._state.outbox.tell_notice(replace(notice, message=fences.clean(notice.message), at=now), now)
        return True

    async def trim_outbox(self, *, age_s: float, rows: int) -> int:
        tables, now = self._state.outbox, self._state.clock.now()
        dropped = 0
        for channel_id in tables.channels:
            all_rows = sorted(
                (number, at, stream)
                for _, stream in tables.streams_of(channel_id)
                for number, (_, at) in stream.waiting.items()
            )
            for place, (number, at, stream) in enumerate(all_rows):
                late = (now - at).total_seconds() > age_s
                if late or place < len(all_rows) - rows:
                    del stream.waiting[number]
                    tables.dropped[channel_id][TOO_OLD if late else TOO_MANY] += 1
                    dropped += 1
        self._forget(now)
        return dropped

    def _forget(self, now: datetime) -> None:
        tables, before = self._state.outbox, now - timedelta(seconds=IDLE_S)
        tables.streams = {
            key: row for key, row in tables.streams.items() if row.waiting or row.refresh_at or row.used_at >= before
        }
        told = {delivery.id for row in tables.streams.values() for delivery, _ in row.waiting.values()}
        tables.notices = {
            own: notice
            for own, notice in tables.notices.items()
            if notice.at is None or notice.at >= before or f"ntc_{own}" in told
        }
        tables.seen = {key: until for key, until in tables.seen.items() if until > now}

    async def first_time(self, key: str, *, for_s: float) -> bool:
        now, seen = self._state.clock.now(), self._state.outbox.seen
        if key in seen and seen[key] > now:
            return False
        seen[key] = now + timedelta(seconds=for_s)
        return True


def _settle(row: StreamRow, settled: DeliveryResult, now: datetime) -> None:
    for number in (*settled.done, *settled.dropped):
        row.waiting.pop(number, None)
    refresh_s = settled.refresh_in_s
    row.state, row.attempts, row.used_at, row.lease_until = settled.state, settled.attempts, now, None
    row.due_at = now + timedelta(seconds=settled.due_in_s)
    row.refresh_at = None if refresh_s is None else now + timedelta(seconds=refresh_s)
