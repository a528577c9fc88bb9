"""`ports.offer_history` in memory, without the document rows that PostgreSQL uses."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import cast

from broker.domain.job import Reason
from broker.domain.market.offer_history import (
    DAY_BUCKETS,
    HistoryQuery,
    HistoryRun,
    MarketGroup,
    OfferSample,
    RecordedHistory,
    bucket_of,
)
from broker.domain.market.spot_evidence import OwnSpotRun, SpotEvidence
from broker.reporting.offer_history import joined
from tests.support.memory_store.state import MemoryPart


class MemoryTenantOfferHistory(MemoryPart):
    async def offer_history(self, query: HistoryQuery) -> RecordedHistory:
        first, last, market = bucket_of(query.since), bucket_of(query.until), self._state.market
        runs: dict[MarketGroup, list[HistoryRun]] = defaultdict(list)
        listed: dict[str, list[HistoryRun]] = defaultdict(list)
        for (provider, bucket), sample in sorted(market.samples.items()):
            # As in a database, where days are read whole.
            if first - DAY_BUCKETS < bucket <= last:
                listed[provider].append(HistoryRun(bucket, 1, None, None, None))
                for group, figures in sample.figures.items():
                    if query.accepts(group):
                        runs[group].append(HistoryRun(bucket, 1, *figures))
        refused = {
            group: {bucket for bucket in buckets if first <= bucket <= last}
            for group, buckets in market.refusals.items()
            if query.accepts(group)
        }
        return RecordedHistory(
            runs={group: joined(found) for group, found in runs.items()},
            listed={provider: joined(found) for provider, found in listed.items()},
            refused={group: buckets for group, buckets in refused.items() if buckets},
        )

    async def recorded_accelerators(self) -> Sequence[str]:
        market = self._state.market
        sampled = {group.accelerator for sample in market.samples.values() for group in sample.figures}
        return sorted(sampled | {group.accelerator for group in market.refusals})


class MemoryOfferHistory(MemoryPart):
    """The part of the history that the controllers use."""

    async def record_offers(self, samples: Sequence[OfferSample]) -> Sequence[bool]:
        return [self._state.market.samples.setdefault((s.provider, s.bucket), s) is s for s in samples]

    async def record_refusal(self, group: MarketGroup, bucket: int) -> None:
        self._state.market.refusals[group].add(bucket)

    async def spot_evidence(self, accelerators: Collection[str], *, since: datetime) -> SpotEvidence:
        query = HistoryQuery(accelerators=accelerators, since=since, until=self._state.clock.now(), spot=True)
        recorded = await MemoryTenantOfferHistory.offer_history(cast(MemoryTenantOfferHistory, self), query)
        runs = []
        for attempt in (row.value for row in self._state.attempts.values()):
            sent, offer, preempted = attempt.create_sent_at, attempt.line.offer, attempt.reason is Reason.PREEMPTED
            if offer.spot and sent is not None and sent > since and (attempt.running_at or preempted):
                begin, end = attempt.running_at or sent, attempt.terminating_since or attempt.ended_at
                end = end or self._state.clock.now()
                group = MarketGroup.of(offer)
                runs.append(OwnSpotRun(group, attempt.line.nodes, begin.timestamp(), end.timestamp(), preempted))
        return SpotEvidence(recorded=recorded, runs=runs)

    async def merge_offer_history(self, *, before: int) -> int:
        market = self._state.market
        new = {key for key in market.samples if key[1] < before} - market.merged
        market.merged |= new
        return len(new)

    async def forget_offer_history(self, *, before: int) -> int:
        market = self._state.market
        old = [key for key in market.samples if key[1] // DAY_BUCKETS * DAY_BUCKETS + DAY_BUCKETS <= before]
        for key in old:
            del market.samples[key]
        market.merged -= set(old)
        count = len(old)
        for buckets in market.refusals.values():
            late = {bucket for bucket in buckets if bucket < before}
            buckets -= late
            count += len(late)
        return count
