"""Channels and the outbox on PostgreSQL."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from broker.domain.ids import JobId
from broker.domain.job import Attempt
from broker.domain.notifications import NOTICES, Channel, Delivery, JobSnapshot, Notice
from broker.ports import ChannelStatus, DeliveryResult, Pending, Settlement, State, Stream
from broker.store.postgres import row_codec as rows
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.pool import QUERIES, Connection, RolledBack, columns
from broker.store.rules import channels as channel_rules
from broker.store.rules import fences
from broker.store.rules.channels import IDLE_S

TRIM = 5000
"""Largest number of deliveries that are dropped in one transaction."""


class PostgresTenantChannels(PostgresPart):
    async def add_channel(self, channel: Channel) -> bool:
        async with self._pool.transaction("add_channel") as connection:
            inserted = await connection.fetch(
                QUERIES["add_channel"], channel.id, channel.team, channel.name, channel.kind, list(channel.events),
                rows.summary_json(channel.config), channel.sealed, channel.enabled, channel.reason,
            )  # fmt: skip
            if inserted:
                await write_audit(connection, [channel_rules.added(self._tenant, channel)])
            return bool(inserted)

    async def channels(self) -> Sequence[ChannelStatus]:
        return [_status(row) for row in await self._pool.read("channels")]

    async def write_channel(self, channel: Channel, sealed: bytes | None = None) -> bool:
        async with self._pool.transaction("write_channel") as connection:
            records = await connection.fetch(QUERIES["lock_channel"], channel.id)
            if not records:
                return False
            before = _channel(records[0])
            if sealed not in (None, before.sealed):
                return False
            await connection.execute(
                QUERIES["write_channel"], channel.id, list(channel.events), rows.summary_json(channel.config),
                channel.sealed, channel.enabled, fences.clean(channel.reason),
            )  # fmt: skip
            await write_audit(connection, [channel_rules.changed(self._tenant, before, channel)])
            return True

    async def delete_channel(self, channel_id: str) -> bool:
        async def once() -> bool:
            async with self._pool.transaction("delete_channel") as connection:
                deleted = await connection.fetch(QUERIES["delete_channel"], channel_id)
                await write_audit(connection, [channel_rules.removed(self._tenant, _channel(row)) for row in deleted])
                return bool(deleted)

        return await self._pool.retried(once, RolledBack)


class PostgresChannels(PostgresPart):
    """`ports.channels.ChannelStore`: the outbox, as its controller uses it."""

    async def claim_streams(
        self, kinds: Sequence[str], *, busy: Sequence[str], owner: str, lease_s: float, limit: int, depth: int
    ) -> Sequence[Stream]:
        leased = await self._pool.fetch("claim_streams", list(kinds), list(busy), owner, lease_s, limit)
        if not leased:
            return []
        names = columns((row["id"], row["stream"]) for row in leased)
        pending: defaultdict[tuple[str, str], list[Pending]] = defaultdict(list)
        attempts = {(row["id"], row["stream"]): row["attempts"] for row in leased}
        for row in await self._pool.read("pending", *names, depth):
            key = row["channel_id"], row["stream"]
            pending[key].append(_pending(row, 0 if pending[key] else attempts[key]))
        snapshots = await self._snapshots({row["stream"] for row in leased} - {NOTICES})
        return [
            Stream(
                channel=_channel(row),
                name=row["stream"],
                epoch=row["epoch"],
                pending=tuple(pending[row["id"], row["stream"]]),
                state=_object(row["state"]),
                snapshot=snapshots.get(row["stream"]),
            )
            for row in leased
        ]

    async def _snapshots(self, jobs: Iterable[str]) -> dict[str, JobSnapshot]:
        job_ids = sorted(jobs)
        if not job_ids:
            return {}
        attempts: defaultdict[JobId, list[Attempt]] = defaultdict(list)
        for row in await self._pool.read("attempts_of_jobs", job_ids):
            attempts[JobId(row["job_id"])].append(rows.attempt(row))
        snapshot_jobs = [rows.job(row) for row in await self._pool.read("jobs_by_id", job_ids)]
        return {job.id: JobSnapshot(job=job, attempts=tuple(attempts[job.id])) for job in snapshot_jobs}

    async def settle(self, settlement: Settlement) -> int:
        return await self._pool.retried(lambda: self._settle(settlement), RolledBack)

    async def _settle(self, settlement: Settlement) -> int:
        channel = settlement.channel
        async with self._pool.transaction("settle") as connection:
            if not await connection.fetch(QUERIES["lock_channel"], channel.id):
                return 0
            names = [settled.stream.name for settled in settlement.streams]
            records = await connection.fetch(QUERIES["lock_streams"], channel.id, names)
            epochs = {row["name"]: row["epoch"] for row in records}
            current = [result for result in settlement.streams if epochs.get(result.stream.name) == result.stream.epoch]
            if current:
                finished = [row for result in current for row in (*result.done, *result.dropped)]
                await self._drop(
                    connection, channel.id, finished, [r for result in current for r in result.dropped.values()]
                )
                await connection.execute(QUERIES["settle_streams"], channel.id, *columns(map(_settled, current)))
            await self._move(connection, settlement)
            if settlement.notice is not None:
                await connection.fetch(QUERIES["post"], *posted(settlement.notice))
            return len(current)

    async def _drop(self, connection: Connection, channel_id: str, ids: list[int], reasons: list[str]) -> None:
        if ids:
            await connection.execute(QUERIES["drop_deliveries"], channel_id, ids)
        if reasons:
            await connection.execute(QUERIES["count_drops"], channel_id, reasons)

    async def _move(self, connection: Connection, settlement: Settlement) -> None:
        to = settlement.channel
        if settlement.moves:
            reason = fences.clean(to.reason)
            await connection.execute(QUERIES["move_channel"], to.id, to.failures, reason, to.enabled, settlement.wait_s)

    async def post(self, notice: Notice) -> bool:
        return bool(await self._pool.fetch("post", *posted(notice)))

    async def trim_outbox(self, *, age_s: float, rows: int) -> int:
        dropped = 0
        for status in await self._pool.read("channels"):
            more = status["waiting"] > 0
            while more:
                n = await self._trim(status["id"], age_s, rows)
                dropped, more = dropped + n, n == TRIM
        await self._pool.fetch("forget", IDLE_S)
        return dropped

    async def _trim(self, channel_id: str, age_s: float, rows: int) -> int:
        async with self._pool.transaction("trim_outbox") as connection:
            if not await connection.fetch(QUERIES["lock_channel"], channel_id):
                return 0
            overdue = await connection.fetch(QUERIES["overdue"], channel_id, age_s, rows, TRIM)
            if overdue:
                await connection.fetch(QUERIES["lock_streams"], channel_id, list({row["stream"] for row in overdue}))
                await self._drop(
                    connection, channel_id, [row["id"] for row in overdue], [row["reason"] for row in overdue]
                )
            return len(overdue)

    async def first_time(self, key: str, *, for_s: float) -> bool:
        return bool(await self._pool.fetch("first_time", key, for_s))


def _object(text: str | None) -> dict[str, Any] | None:
    """Return a jsonb object; None: the column is null."""
    return None if text is None else dict(json.loads(text))


def _channel(row: rows.Record) -> Channel:
    return Channel(
        id=row["id"],
        kind=row["kind"],
        name=row["name"],
        team=row["team"],
        events=tuple(row["events"]),
        config=_object(row["config"]) or {},
        sealed=row["sealed"],
        created_at=row["created_at"],
        enabled=row["enabled"],
        reason=row["reason"],
        failures=row["failures"],
    )


def _status(row: rows.Record) -> ChannelStatus:
    return ChannelStatus(
        channel=_channel(row),
        waiting=row["waiting"],
        oldest_s=row["oldest_s"],
        dropped=_object(row["dropped"]) or {},
    )


def _pending(row: rows.Record, attempts: int) -> Pending:
    event = rows.event(row) if row["job_id"] else None
    notice = _notice(row) if row["n_id"] else None
    delivery = Delivery(stream=row["stream"], event=event, notice=notice, attempts=attempts)
    return Pending(row=row["row"], delivery=delivery)


def _notice(row: rows.Record) -> Notice:
    return Notice(
        id=row["n_id"],
        kind=row["n_kind"],
        message=row["n_message"],
        team=row["n_team"],
        data=_object(row["n_data"]) or {},
        at=row["n_at"],
    )


def posted(notice: Notice) -> tuple[Any, ...]:
    """Return the values of `post`."""
    return notice.id, notice.team, notice.kind, fences.clean(notice.message), rows.summary_json(notice.data)


def _settled(settled: DeliveryResult) -> tuple[Any, ...]:
    """Return a row of `settle_streams`."""
    state: State | None = settled.state
    return (
        settled.stream.name, rows.summary_json(state), settled.attempts, settled.due_in_s, settled.refresh_in_s,
    )  # fmt: skip
