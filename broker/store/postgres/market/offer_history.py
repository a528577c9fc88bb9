"""`ports.offer_history` on PostgreSQL.

Brokers insert one row a bucket, provider and GPU. An hour later the rows of a day are merged, so that a year of four
clouds takes less than 200 MB.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

from broker.domain.market.offer_history import (
    HistoryQuery,
    HistoryRun,
    MarketGroup,
    OfferSample,
    RecordedHistory,
    bucket_of,
)
from broker.domain.market.spot_evidence import OwnSpotRun, SpotEvidence
from broker.reporting.offer_history import joined
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart
from broker.store.postgres.pool import QUERIES, Pool, columns
from broker.store.rules.offer_history import LISTED, HistoryDocument, day_of, documents_of, merged, unpacked


class PostgresTenantOfferHistory(PostgresPart):
    _all_teams_pool: Pool

    async def offer_history(self, query: HistoryQuery) -> RecordedHistory:
        """Read with the daemon's rights, because no team owns the market; unpack in a thread, since it takes long."""
        first, last, names = bucket_of(query.since), bucket_of(query.until), sorted(query.accelerators)
        rows = await self._all_teams_pool.read("offer_history", [LISTED, *names], first, last)
        refused: dict[MarketGroup, set[int]] = defaultdict(set)
        for row in await self._all_teams_pool.read("offer_refusals", names, first, last):
            *group, bucket = row
            refused[MarketGroup(*group)].add(bucket)
        return await asyncio.to_thread(_selected, list(map(_document, rows)), dict(refused), query)

    async def recorded_accelerators(self) -> Sequence[str]:
        return [row["name"] for row in await self._all_teams_pool.read("recorded_accelerators")]


class PostgresOfferHistory(PostgresPart):
    """The part of the history that the controllers use."""

    async def record_offers(self, samples: Sequence[OfferSample]) -> Sequence[bool]:
        if not samples:
            return []
        documents = await asyncio.to_thread(_packed, samples)  # 10 ms for 1,300 groups
        new_buckets = {
            (row["provider"], row["bucket"]) for row in await self._pool.fetch("record_offers", *columns(documents))
        }
        return [(sample.provider, sample.bucket) in new_buckets for sample in samples]

    async def record_refusal(self, group: MarketGroup, bucket: int) -> None:
        await self._pool.read("record_refusal", *group, bucket)

    async def spot_evidence(self, accelerators: Collection[str], *, since: datetime) -> SpotEvidence:
        """Read all kinds of observations at once; unpack in a thread, since it takes long."""
        names = sorted(accelerators)
        query = HistoryQuery(accelerators=names, since=since, until=since, spot=True)
        rows = await self._pool.read("spot_evidence", [LISTED, *names], bucket_of(since))
        return await asyncio.to_thread(_evidence, rows, query)

    async def merge_offer_history(self, *, before: int) -> int:
        async with self._pool.transaction("merge_offer_history") as connection:
            if not await connection.fetchval(QUERIES["lock_offer_history"]):
                return 0
            samples = list(map(_document, await connection.fetch(QUERIES["take_samples"], before)))
            if not samples:
                return 0
            starts = sorted({day_of(row.bucket) for row in samples})
            days = map(_document, await connection.fetch(QUERIES["take_days"], starts))
            rows = await asyncio.to_thread(merged, [*days, *sorted(samples, key=lambda row: row.bucket)])
            await connection.execute(QUERIES["put_days"], *columns(rows))
            return len(samples)

    async def forget_offer_history(self, *, before: int) -> int:
        async with self._pool.transaction("forget_offer_history") as connection:
            if not await connection.fetchval(QUERIES["lock_offer_history"]):
                return 0
            return int(await connection.fetchval(QUERIES["forget_offer_history"], before))


def _packed(samples: Sequence[OfferSample]) -> list[HistoryDocument]:
    return [row for sample in samples for row in documents_of(sample)]


def _document(row: row_codec.Record) -> HistoryDocument:
    return HistoryDocument(row["accelerator"], row["provider"], row["bucket"], row["document"])


def _evidence(rows: Sequence[row_codec.Record], query: HistoryQuery) -> SpotEvidence:
    documents, refused = list[tuple[bool, HistoryDocument]](), defaultdict[MarketGroup, set[int]](set)
    runs = list[OwnSpotRun]()
    for row in rows:
        group = MarketGroup(row["provider"], row["cloud"], row["region"], row["accelerator"], row["gpus"], True)
        if row["kind"] == "listed":
            bucket = int(row["since"])
            document = HistoryDocument(row["accelerator"], row["provider"], bucket, row["document"])
            documents.append((not row["is_flagged"], document))
        elif row["kind"] == "refused":
            refused[group].add(int(row["since"]))
        else:
            runs.append(OwnSpotRun(group, row["nodes"], row["since"], row["until"], row["is_flagged"]))
    documents.sort(key=lambda entry: (entry[0], entry[1].bucket))  # of two figures of a bucket the merged one counts
    recorded = _selected([document for _, document in documents], refused, query)
    return SpotEvidence(recorded=recorded, runs=runs)


def _selected(
    documents: Iterable[HistoryDocument], refused: dict[MarketGroup, set[int]], query: HistoryQuery
) -> RecordedHistory:
    runs: dict[MarketGroup, list[HistoryRun]] = defaultdict(list)
    for document in documents:
        for group, group_runs in unpacked(document).items():
            if document.accelerator == LISTED or query.accepts(group):
                runs[group] += group_runs
    joined_runs = {group: joined(group_runs) for group, group_runs in runs.items()}
    return RecordedHistory(
        runs={group: group_runs for group, group_runs in joined_runs.items() if group.accelerator != LISTED},
        listed={group.provider: group_runs for group, group_runs in joined_runs.items() if group.accelerator == LISTED},
        refused={group: buckets for group, buckets in refused.items() if query.accepts(group)},
    )
